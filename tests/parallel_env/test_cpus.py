"""The usable processors: affinity, control groups of both versions, and pinning."""

import os
from pathlib import Path

import pytest
from support.scripts import run_python

from marl_collect.parallel_env import cpus
from marl_collect.parallel_env.cpus import effective_cpus, is_rationed
from marl_collect.processes import cgroups

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no affinities"
)

ALLOWED = len(os.sched_getaffinity(0))
HALF, NO_LIMIT, AS_MANY = "50000 100000", "max 100000", f"{ALLOWED * 100000} 100000"


def of_version_1(folder: str, quota: int) -> dict[str, str]:
    files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000}
    return {f"{folder}/{name}": f"{number}" for name, number in files.items()}


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "rationed"),
    [
        (None, {}, ALLOWED, False),
        ("0::/a/b", {"a/b/cpu.max": HALF}, 1, True),
        ("0::/a/b", {"a/b/cpu.max": NO_LIMIT, "a/cpu.max": HALF}, 1, True),
        ("0::/a/b", {"a/b/cpu.max": NO_LIMIT, "cpu.max": HALF}, 1, True),
        ("0::/", {"cpu.max": AS_MANY}, ALLOWED, False),
        ("7:memory:/a\n3:cpu,cpuacct:/a", of_version_1("cpu/a", 40000), 1, True),
        ("3:cpu:/", of_version_1("cpu", -1), ALLOWED, False),
        ("0::/", {"cpu.max": f"{ALLOWED * 100000 - 1000} 100000"}, ALLOWED, True),
    ],
)
def test_the_tightest_quota_below_the_affinity_counts(
    groups: str | None,
    files: dict[str, str],
    cpus: int,
    rationed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_MOUNT", tmp_path / "mount")
    if groups is not None:
        (tmp_path / "cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert (effective_cpus(), is_rationed()) == (cpus, rationed)


def test_affinity_of_one_processor_counts() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert effective_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


# Pinning: only if there are exactly as many workers as processors


SCRIPT = """
import os
from marl_collect import ParallelEnv
from marl_collect.parallel_env.cpus import is_rationed
from workloads.counting import CountingEnv

two = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, two)

class Where(CountingEnv):
    allowed = property(lambda self: os.sched_getaffinity(0))

def found(processes, **options):
    with ParallelEnv(processes, Where, num_processes=processes, **options) as env:
        mine = list(env.allowed)
    assert os.sched_getaffinity(0) == set(two), "the trainer is pinned"
    return mine

several, all_of_them = len(two) == 2 and not is_rationed(), set(two)
assert found(2) == ([{one} for one in two] if several else [all_of_them] * 2)
assert found(1) == [all_of_them]
assert found(3) == [all_of_them] * 3
assert found(2, num_sub_threads=2) == [all_of_them] * 2
assert found(2, pin_processes=False) == [all_of_them] * 2
"""


def test_each_process_is_pinned_to_one_processor() -> None:
    # A fork server that was started earlier would have all processors.
    process = run_python("-c", SCRIPT, interpreter=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "obstacle", ["", "rationed time", "an affinity of the user", "a sandbox"]
)
def test_workers_are_pinned_if_each_processor_has_one(
    monkeypatch: pytest.MonkeyPatch, workers: int, obstacle: str
) -> None:
    allowed, chosen = frozenset({4, 5, 7}), list[set[int]]()

    def set_affinity(thread: int, cores: set[int]) -> None:
        assert thread == 0, "another thread than this one is pinned"
        if obstacle == "a sandbox":
            raise PermissionError
        chosen.append(cores)

    monkeypatch.setattr(cpus, "is_rationed", lambda: obstacle == "rationed time")
    monkeypatch.setattr(cpus, "affinity", lambda: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    before = allowed | {8} if obstacle == "an affinity of the user" else allowed
    results = [cpus.pin(worker, workers, before) for worker in range(workers)]
    are_pinned = workers == 3 and not obstacle
    assert results == [are_pinned] * workers
    assert chosen == ([{4}, {5}, {7}] if are_pinned else [])
