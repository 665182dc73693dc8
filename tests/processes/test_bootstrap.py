"""The environment of a new worker: copied from the trainer, or its own."""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pool_tools import be_up, obey

from marl_collect.processes import WorkerPool
from marl_collect.processes.launcher import StartMethod

# Workers get what is defined here by value: importing this file would import pytest.


def test_workers_have_the_trainers_environment_path_and_directory(
    any_pool: WorkerPool,
    start_method: StartMethod,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    be_up(any_pool)
    monkeypatch.setenv("MARL_TEST", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "3"])
    monkeypatch.chdir(tmp_path)

    def look(worker: Any, argument: Any) -> Any:
        names = ("MARL_TEST", "OMP_NUM_THREADS")
        values = [os.environ.get(name) for name in names]
        return values, sys.path[0], sys.argv, os.getcwd()

    with WorkerPool(obey, [0], start_method=start_method) as second:
        second.send(0, look)
        _, surroundings = second.receive()
    path = str(tmp_path)
    assert surroundings == (["1", "1"], path, ["train.py", "--seed", "3"], path)


def test_a_new_worker_has_its_name_its_threads_no_large_library_and_bypasses_the_caches(
    start_method: StartMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=0")

    def look(worker: Any, argument: Any) -> Any:
        started, name = (Path("/proc/self", n).read_text() for n in ("environ", "comm"))
        large = {"torch", "tensordict", "numpy", "gymnasium"} & set(sys.modules)
        variables = ("OMP_NUM_THREADS", "GLIBC_TUNABLES")
        settings = [os.environ.get(variable) for variable in variables]
        return name, large, started.replace("\0", ":"), *settings

    options: Any = {"start_method": start_method, "num_threads": 3, "name": "pool"}
    preload = ("graphlib",)  # A server of its own, which starts now.
    with WorkerPool(obey, [0, 1], preload=preload, **options) as pool:
        pool.send(1, look)
        worker, (name, large, started, threads, thresholds) = pool.receive()
    assert (worker, name, threads, large) == (1, "pool-1\n", "3", set())
    ours, users = "x86_non_temporal_threshold=0x10000", "glibc.malloc.perturb=0"
    # What comes last wins.
    assert f":GLIBC_TUNABLES=glibc.cpu.{ours}:{users}:" in started
    assert thresholds == users


@pytest.mark.torchrl_defect("D15")
def test_workers_draw_different_numbers_from_numpys_global_generator(
    start_method: StartMethod,
) -> None:
    def draw(worker: Any, argument: Any) -> Any:
        import numpy as np

        return int(np.random.randint(2**62))  # noqa: NPY002 - the one in question

    with WorkerPool(
        obey, [0, 1], start_method=start_method, preload=("numpy.random",)
    ) as pool:
        pool.broadcast(draw)
        assert len({pool.receive()[1] for _ in range(2)}) == 2


def test_output_of_workers_goes_to_the_trainers_current_stdout(
    pool: WorkerPool, tmp_path: Path
) -> None:
    be_up(pool)
    saved = os.dup(1)
    with open(tmp_path / "out", "w") as file:
        os.dup2(file.fileno(), 1)
        try:
            with WorkerPool(obey, [0]) as second:
                second.send(0, lambda worker, argument: print("x" * 1_000_000))  # noqa: T201
                second.receive()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert (tmp_path / "out").stat().st_size == 1_000_001


def test_output_of_c_code_is_not_lost(
    capfd: pytest.CaptureFixture[str],
    start_method: StartMethod,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(worker: Any, argument: Any) -> None:
        ctypes.CDLL(None).puts(b"from C")

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with WorkerPool(
        main, [0], start_method=start_method, preload=("colorsys",)
    ) as pool:
        pool.close()
    assert capfd.readouterr().out == "from C\n"


def test_pyarrow_starts_no_thread_in_the_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "dirty_decay_ms:5")

    def look(worker: Any, argument: Any) -> Any:
        return Path("/proc/self/environ").read_text()

    # A server refuses a module that starts a thread.
    preload = ("pyarrow" if importlib.util.find_spec("pyarrow") else "fractions",)
    with WorkerPool(obey, [0], start_method="forkserver", preload=preload) as pool:
        pool.send(0, look)
        variable = "JE_ARROW_MALLOC_CONF=dirty_decay_ms:5,background_thread:false"
        assert variable in pool.receive()[1]
