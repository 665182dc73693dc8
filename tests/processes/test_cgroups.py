"""The memory that control groups of both versions leave to this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marl_collect.processes import cgroups
from marl_collect.processes.shared_memory import Segment

GIB = 1 << 30


@contextmanager
def tree(root: Path, groups: str, files: dict[str, int | str]) -> Iterator[None]:
    """Write control groups; use them in this context."""
    proc, mount = root / "cgroup", root / "mount"
    proc.write_text(groups)
    mount.mkdir()
    for name, value in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "_PROC", proc)
        patch.setattr(cgroups, "_MOUNT", mount)
        yield


def test_copies_of_files_in_memory_are_free(tmp_path: Path) -> None:
    """A limit of 8 GiB with 6 GiB of cached files once refused a batch of 200 MiB."""
    stat = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}"
    files: dict[str, int | str] = {
        "memory.max": 8 * GIB,
        "memory.current": 8 * GIB - 100,
        "memory.stat": stat,
    }
    with tree(tmp_path, "0::/\n", files):
        assert cgroups.free_memory() == 6 * GIB + 100


def test_shared_memory_is_not_free(tmp_path: Path) -> None:
    stat = f"file {6 * GIB}\nshmem {6 * GIB}\ninactive_file 0\nactive_file 0"
    files: dict[str, int | str] = {
        "memory.max": 8 * GIB,
        "memory.current": 7 * GIB,
        "memory.stat": stat,
    }
    with tree(tmp_path, "0::/\n", files):
        assert cgroups.free_memory() == GIB


@pytest.mark.parametrize("at", ["", "job", "job/step"])
def test_the_tightest_group_counts(tmp_path: Path, at: str) -> None:
    files: dict[str, int | str] = {}
    for group in ("", "job", "job/step"):
        files[f"{group}/memory.max".lstrip("/")] = 4 * GIB if group == at else "max"
        files[f"{group}/memory.current".lstrip("/")] = GIB
    with tree(tmp_path, "0::/job/step\n", files):
        assert cgroups.free_memory() == 3 * GIB


def test_version_1_counts_too(tmp_path: Path) -> None:
    files: dict[str, int | str] = {
        "memory/job/memory.limit_in_bytes": 4 * GIB,
        "memory/job/memory.usage_in_bytes": 4 * GIB,
        "memory/job/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 5",
    }
    groups = "7:memory:/job\n3:cpu,cpuacct:/job\n"
    with tree(tmp_path, groups, files):
        assert cgroups.free_memory() == GIB + 5


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files: dict[str, int | str] = {"memory.max": GIB, "memory.current": 2 * GIB}
    with tree(tmp_path, "0::/\n", files):
        assert cgroups.free_memory() == 0


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    files: dict[str, int | str] = {"memory.max": "max", "memory.current": GIB}
    with tree(tmp_path, "0::/\n", files):
        assert cgroups.free_memory() is None
    (tmp_path / "cgroup").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "_PROC", tmp_path / "cgroup")
        assert cgroups.free_memory() is None


def test_a_segment_needs_what_the_group_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "free_memory", lambda: 1 << 20)
    for new in (Segment.create, Segment.ordinary):
        new(1 << 19, "The moon").close()
        with pytest.raises(MemoryError, match=r"needs 2.0 MiB .* 1.0 MiB is free"):
            new(1 << 21, "The moon")
