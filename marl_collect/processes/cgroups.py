"""What the control groups of this process grant it: processor time and memory.

A process has the limits of its own group and of all groups around it. In a container
the files of the own group are usually those of the mount itself.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")

_VERSION_2: Final = ""


def cpu_quotas() -> Iterator[float]:
    """Yield the limits of processor time, in processors."""
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError):
            if version == _VERSION_2:  # "max 100000" means no limit.
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                yield int(quota) / int(period)


def free_memory() -> int | None:
    """Return how many bytes the limits of memory leave; None if there is no limit.

    Copies of files in memory count as free, because the kernel drops them if memory is
    short. Shared memory is not among them.
    """
    left: list[int] = []
    for version, folder in _groups("memory"):
        with suppress(OSError, ValueError):
            if version == _VERSION_2:  # "max" means no limit.
                limit = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                caches = ("inactive_file", "active_file")
            else:
                limit = int((folder / "memory.limit_in_bytes").read_text())
                used = int((folder / "memory.usage_in_bytes").read_text())
                caches = ("total_inactive_file", "total_active_file")
            left.append(max(0, limit - used + _sum_of(folder / "memory.stat", caches)))
    return min(left, default=None)


def _sum_of(stat: Path, names: tuple[str, ...]) -> int:
    entries: dict[str, str] = {}
    with suppress(OSError):
        lines = stat.read_text().splitlines()
        entries = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(entries.get(name, 0)) for name in names)


def _groups(controller: str) -> Iterator[tuple[str, Path]]:
    """Yield the version and the folder of each group that may limit a resource."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _PROC.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == _VERSION_2:
            root = _MOUNT
        elif controller in controllers.split(","):
            root = _MOUNT / controller
        else:
            continue
        for folder in _upwards(root, path):
            yield controllers, folder


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents, up to the mount itself."""
    folder = mount / path.lstrip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount
