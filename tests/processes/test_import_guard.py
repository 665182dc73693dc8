"""Modules that build a collector at their top level, imported by workers.

Every script counts how often its module is imported, and stops at ten: should the
refusal break, the tests fail, and the machine lives on.
"""

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.processes import left, wait_until, wait_until_gone
from support.scripts import LIMIT, start_python

pytest_plugins = ["support.ray_cluster"]

HEAD = """
import os, sys
from marl_collect import MultiSyncCollector, ParallelEnv
from marl_collect.parallel_env.describe import describe
from workloads.counting import CountingEnv

with open({log!r}, "a") as file:
    print(os.getpid(), file=file, flush=True)
with open({log!r}) as file:
    if len(file.readlines()) > 10:
        os._exit(7)

def make():
    return CountingEnv()

"""
SYNC = "c = MultiSyncCollector([make] * 2, None, frames_per_batch=20, total_frames=20)"
COUNT = "\nprint(sum(b.numel() for b in c))"
ADVICE = 'under `if __name__ == "__main__":` or in a function'


def run(folder: Path, *command: str, timeout: float = LIMIT) -> tuple[int, str, str]:
    """Run Python in a folder, check for leftover processes; return code and outputs."""
    mark = f"ENDLESS_TEST={folder}"
    env = {**os.environ, "ENDLESS_TEST": str(folder)}
    with start_python(*command, cwd=folder, env=env) as program:
        out, err = program.communicate(timeout=timeout)
    # Those of Ray take a moment.
    wait_until(lambda: not left(program.pid, mark), "processes are left")
    return program.wait(), out, err


def write(folder: Path, body: str) -> Path:
    """Write ``train.py``; return the file in which its imports are counted."""
    log = folder / "imports"
    text = HEAD.format(log=str(log)) + textwrap.dedent(body)
    (folder / "train.py").write_text(text)
    return log


STARTS = {
    "sync": SYNC,
    "spawn": SYNC.replace("[make] * 2", "make").replace(
        "total", "start_method='spawn', total"
    ),
    "ParallelEnv": "env = ParallelEnv(2, make)",
    "describe": "describe(make)",
    "preload": SYNC.replace("total", "preload=['train'], total"),
    "by a factory": SYNC.replace(
        "[make] * 2", "[lambda: __import__('train').make()] * 2"
    ),
}


@pytest.mark.parametrize("body", STARTS.values(), ids=STARTS.keys())
def test_a_module_that_builds_a_collector_is_refused_in_workers(
    tmp_path: Path, body: str
) -> None:
    log = write(tmp_path, body)
    code, _, errors = run(tmp_path, "-c", "import train")
    assert code == 1
    assert ADVICE in errors
    assert len(log.read_text().split()) <= 3
    assert "importing the module 'train' (" in errors
    assert "train.py, line" in errors


@pytest.mark.timeout(300)  # On a busy machine Ray starts in minutes.
def test_a_module_that_builds_a_ray_collector_is_refused(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    body = """
        from marl_collect import RayCollector
        RayCollector([make] * 2, frames_per_batch=20, total_frames=20)
        """
    log = write(tmp_path, body)
    code, _, errors = run(tmp_path, "-c", "import train", timeout=250)
    assert code == 1
    assert "A worker is still importing the module 'train'" in errors
    pids = [int(pid) for pid in log.read_text().split()]
    assert 2 <= len(pids) <= 3  # The script, and a worker of each actor.
    wait_until_gone(pids)


def test_the_script_itself_needs_no_guard(tmp_path: Path) -> None:
    write(tmp_path, SYNC + COUNT)
    assert run(tmp_path, "train.py") == (0, "20\n", "")


@pytest.mark.parametrize(
    "guarded",
    ["if __name__ == '__main__':\n    {}", "def main():\n    {}\n    return c"],
)
def test_the_advice_of_the_error_works(tmp_path: Path, guarded: str) -> None:
    write(tmp_path, guarded.format(SYNC))
    command = "import train; [*getattr(train, 'main', list)()]"
    assert run(tmp_path, "-c", command) == (0, "", "")


def test_a_factory_may_open_processes_when_it_is_called(tmp_path: Path) -> None:
    body = """
        def nested():
            import json.tool  # An import that is over.
            exec("env = ParallelEnv(2, make)", globals())
            return env

        def main():
            c = MultiSyncCollector(
                [nested] * 2, None, frames_per_batch=20, total_frames=20
            )
            print(sum(b.numel() for b in c))
        """
    write(tmp_path, body)
    assert run(tmp_path, "-c", "import train; train.main()") == (0, "20\n", "")


def test_an_argument_that_opens_a_pool_while_it_is_unpickled_is_refused(
    tmp_path: Path,
) -> None:
    body = """
        class Endless:
            def __call__(self):
                return CountingEnv()

            def __reduce__(self):
                return again, ()

        def again():
            ParallelEnv(2, Endless())
            return make
        """
    write(tmp_path, body)
    code, _, errors = run(tmp_path, "-c", "import train; train.again()")
    assert code == 1
    assert "still unpickling its main function and its factories" in errors
