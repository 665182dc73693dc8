"""What starting costs: importing MeltingPot, and ``marl-collect view``.

Each call is a process of its own. MeltingPot is imported alone and through this
package; the size is the process's resident memory. ``view`` opens a dataset of
1,000,000 frames in 10,000 episodes, and ends when the page has the first part of the
list. Other work of the machine does not count in its processor time.
"""

import json
import mmap
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from harness.turns import Alternative
from workloads.counting import CountingEnv

from cases.case import Case
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, Writer

STATEMENTS = {
    "marl_collect.envs, for a substrate": (
        "from marl_collect.envs import MeltingpotEnv; MeltingpotEnv('coins').close()"
    ),
    "meltingpot.substrate": "import meltingpot.substrate",
}
_PAGES = "; print(open('/proc/self/statm').read().split()[1])"
"""Prints resident memory. The peak of ``resource`` would include the parent's."""


def importing(source: str) -> Alternative:
    """Return the call that runs a statement in a process of its own."""
    resident = [0]

    def call() -> None:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", source + _PAGES],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise ImportError(process.stderr.strip().splitlines()[-1])
        resident[0] = int(process.stdout.split()[-1]) * mmap.PAGESIZE

    return Alternative(Alternative.once(call).call, nbytes=lambda: resident[0])


def write(path: Path) -> None:
    """Write 1,000,000 frames: 200 episodes of 100 frames, 50 times."""
    env = partial(CountingEnv, min_length=100, max_length=100, deaths=False)
    with Collector([env] * 20, frames_per_batch=20_000, seed=0) as collector:
        batch, about = collector.next(), collector.description
    for _ in range(50):  # One run each, because trajectories would repeat.
        with Writer(path, DatasetDescription("counting", about)) as writer:
            writer.add(batch)


def view(path: Path) -> None:
    """Open the page of a dataset, and ask for what it shows first."""
    command = (sys.executable, "-W", "ignore", "-m", "marl_collect.cli.main", "view")
    with subprocess.Popen(
        [*command, path, "--no-browser"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        for request in ("", "about"):
            urlopen(address + request).close()
        with urlopen(f"{address}episodes?begin=0") as response:
            assert json.load(response)["number"]
        process.send_signal(signal.SIGINT)


def viewing(stack: ExitStack) -> dict[str, Alternative]:
    """Return the opening of a large dataset, and the import of torch."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "data"
    write(path)
    return {
        "marl-collect view": Alternative.once(partial(view, path)),
        "import torch, tensordict": importing("import torch, tensordict"),
    }


def processor_time() -> float:
    """Return the processor time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build(_: ExitStack) -> dict[str, Alternative]:
    """Return a process per statement."""
    return {name: importing(source) for name, source in STATEMENTS.items()}


def cases() -> list[Case]:
    """Return the rows."""
    return [
        Case("import", build, "process", "s", clock=time.perf_counter),
        Case("view, elapsed time", viewing, "process", "s", clock=time.perf_counter),
        Case("view, processor time", viewing, "process", "s", clock=processor_time),
    ]
