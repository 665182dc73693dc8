"""What importing MeltingPot costs, alone and through this package.

Each call is a process of its own; the size is its resident memory.
"""

import mmap
import subprocess
import sys
import time
from contextlib import ExitStack

from harness.turns import Alternative

from cases.case import Case

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


def build(_: ExitStack) -> dict[str, Alternative]:
    """Return a process per statement."""
    return {name: importing(source) for name, source in STATEMENTS.items()}


def cases() -> list[Case]:
    """Return the one row."""
    return [Case("import", build, "process", "s", clock=time.perf_counter)]
