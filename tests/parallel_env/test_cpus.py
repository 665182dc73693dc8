"""The number of usable processors: affinity and control groups of both versions."""

import os
from pathlib import Path

import pytest

from marl_collect.parallel_env.cpus import effective_cpus, is_rationed
from marl_collect.processes import cgroups

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
