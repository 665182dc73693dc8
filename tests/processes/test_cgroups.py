"""The memory that control groups of both versions leave to this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marl_collect.processes import cgroups
from marl_collect.processes.shared_memory import Segment

GIB = 1 << 30
Files = dict[str, int | str]


def free(
    root: Path, groups: str, files: Files, ask: Callable[[], Any] = cgroups.free_memory
) -> Any:
    """Return what control groups leave, usually of memory, as these files say."""
    proc, mount = root / "cgroup", root / "mount"
    proc.write_text(groups)
    for name, value in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "_PROC", proc)
        patch.setattr(cgroups, "_MOUNT", mount)
        return ask()


CACHED = f"anon 1\nfile {6 * GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}"
SHARED = f"file {6 * GIB}\nshmem {6 * GIB}\ninactive_file 0\nactive_file 0"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        # This once refused a batch of 200 MiB.
        (8 * GIB, 8 * GIB - 100, CACHED, 6 * GIB + 100),
        (8 * GIB, 7 * GIB, SHARED, GIB),
        (GIB, 2 * GIB, "", 0),  # Above its limit.
        ("max", GIB, "", None),
    ],
)
def test_copies_of_files_in_memory_are_free_and_shared_memory_is_not(
    tmp_path: Path, limit: int | str, used: int, stat: str, expected: int | None
) -> None:
    files: Files = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    assert free(tmp_path, "0::/\n", files) == expected


@pytest.mark.parametrize("at", ["", "job/", "job/step/"])
def test_the_tightest_group_counts(tmp_path: Path, at: str) -> None:
    files: Files = {}
    for group in ("", "job/", "job/step/"):
        files[f"{group}memory.max"] = 4 * GIB if group == at else "max"
        files[f"{group}memory.current"] = GIB
    assert free(tmp_path, "0::/job/step\n", files) == 3 * GIB


def test_version_1_counts_too(tmp_path: Path) -> None:
    stat = f"total_inactive_file {GIB}\ntotal_active_file 5"
    files: Files = {"limit_in_bytes": 4 * GIB, "usage_in_bytes": 4 * GIB, "stat": stat}
    files = {f"memory/job/memory.{name}": value for name, value in files.items()}
    assert free(tmp_path, "7:memory:/job\n3:cpu,cpuacct:/job\n", files) == GIB + 5


def test_the_processor_time_of_every_group_counts(tmp_path: Path) -> None:
    both = "7:cpu,cpuacct:/job\n0::/job/step\n"
    files: Files = {
        "cpu.max": "max 100000",
        "job/cpu.max": "300000 100000",
        "job/step/cpu.max": "50000 100000",
        "cpu/cpu.cfs_quota_us": -1,
        "cpu/cpu.cfs_period_us": 1000,
        "cpu/job/cpu.cfs_quota_us": 2000,
        "cpu/job/cpu.cfs_period_us": 1000,
    }
    quotas = free(tmp_path, both, files, lambda: sorted(cgroups.cpu_quotas()))
    assert quotas == [0.5, 2.0, 3.0]


def test_without_control_groups_there_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "cgroup")
    assert cgroups.free_memory() is None


def test_a_segment_needs_what_the_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "free_memory", lambda: 1 << 20)
    for new in (Segment.create, Segment.ordinary):
        new(1 << 19, "The moon").close()
        with pytest.raises(MemoryError, match=r"needs 2.0 MiB .* 1.0 MiB is free"):
            new(1 << 21, "The moon")
