"""The number of usable processors: affinity and control groups of both versions."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marl_collect.parallel_env.cpus import effective_cpus, is_rationed
from marl_collect.processes import cgroups

ALLOWED = len(os.sched_getaffinity(0))


@contextmanager
def tree(root: Path, groups: str, files: dict[str, str]) -> Iterator[None]:
    root.mkdir(exist_ok=True)
    proc = root / "cgroup"
    proc.write_text(groups)
    mount = root / "mount"
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    mount.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "_PROC", proc)
        patch.setattr(cgroups, "_MOUNT", mount)
        yield


@contextmanager
def without_groups(root: Path) -> Iterator[None]:
    with tree(root / "c", "", {}):
        (root / "c" / "cgroup").unlink()
        yield


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    with without_groups(tmp_path):
        assert effective_cpus() == ALLOWED


def test_affinity_of_one_processor_counts() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert effective_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("at", ["cpu.max", "a/cpu.max", "a/b/cpu.max"])
def test_the_tightest_quota_of_version_2_counts(tmp_path: Path, at: str) -> None:
    files = {"a/b/cpu.max": "max 100000\n", at: "50000 100000\n"}
    with tree(tmp_path, "0::/a/b\n", files):
        assert effective_cpus() == 1


def test_a_large_quota_has_no_effect(tmp_path: Path) -> None:
    files = {"cpu.max": f"{ALLOWED * 100000} 100000\n"}
    with tree(tmp_path, "0::/\n", files):
        assert effective_cpus() == ALLOWED


def test_the_quota_of_version_1_counts(tmp_path: Path) -> None:
    files = {"cpu/a/cpu.cfs_quota_us": "40000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
    groups = "7:memory:/a\n3:cpu,cpuacct:/a\n"
    with tree(tmp_path, groups, files):
        assert effective_cpus() == 1


def test_without_a_quota_of_version_1_there_is_no_limit(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    with tree(tmp_path, "3:cpu:/\n", files):
        assert effective_cpus() == ALLOWED


def test_only_a_quota_below_the_affinity_limits_processor_time(tmp_path: Path) -> None:
    generous = {"cpu.max": f"{ALLOWED * 100000} 100000\n"}
    with tree(tmp_path / "a", "0::/\n", generous):
        assert not is_rationed()
    scarce = {"cpu.max": f"{ALLOWED * 100000 - 1000} 100000\n"}
    with tree(tmp_path / "b", "0::/\n", scarce):
        assert is_rationed()
    with without_groups(tmp_path):
        assert not is_rationed()
