"""An environment is described without being built in this process."""

import os
from pathlib import Path
from typing import Any

import pytest
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect import MultiSyncCollector
from marl_collect.parallel_env.describe import describe
from marl_collect.processes.closing import CLOSE_SECONDS, ERROR_CLOSE_SECONDS
from marl_collect.processes.pool import WorkerPool


def test_description_comes_from_another_process() -> None:
    pid = os.getpid()

    def make() -> CountingEnv:
        assert os.getpid() != pid
        return CountingEnv(n_prey=4)

    description = describe(make)
    assert description.group_map["prey"] == [f"prey_{i}" for i in range(4)]
    assert description.row() == CountingEnv(n_prey=4).description.row()


def test_collectors_use_the_same_fork_server(tmp_path: Path) -> None:
    def make() -> CountingEnv:
        with (tmp_path / "servers").open("a") as file:
            file.write(f"{os.getppid()}\n")
        return CountingEnv()

    describe(make)
    with MultiSyncCollector([make], frames_per_batch=4, total_frames=4) as collector:
        assert next(iter(collector)).shape == (1, 4)
    servers = (tmp_path / "servers").read_text().split()
    assert len(servers) == 2
    assert len(set(servers)) == 1


def test_an_error_of_the_factory_is_raised_unchanged_and_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    close = WorkerPool.close

    def noting(pool: WorkerPool, timeout: float = CLOSE_SECONDS) -> Any:
        limits.append(timeout)
        return close(pool, timeout)

    monkeypatch.setattr(WorkerPool, "close", noting)
    with pytest.raises(CountingError):
        describe(lambda: CountingEnv(fault=Fault("raise", "create")))
    assert limits[0] == ERROR_CLOSE_SECONDS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"start_method": m}, f"start_me.*{m}") for m in ("fork", "Spawn", "thread")),
        *(({"timeout": t}, "^timeout must be a positive number") for t in (0, -1.0)),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        describe(CountingEnv, **options)
    with pytest.raises(TypeError, match="lambda"):
        describe(CountingEnv())  # type: ignore[arg-type]
