"""The connections of workers cannot be opened by anybody else."""

import os
from pathlib import Path

from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector


def socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # Closed meanwhile.
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(table).read_text().splitlines()[1:]]


def test_no_socket_of_a_pool_has_a_name() -> None:
    before = socket_inodes(os.getpid())
    with MultiSyncCollector(
        CountingEnv, frames_per_batch=4, total_frames=8, num_workers=2
    ) as collector:
        next(iter(collector))
        pids = [os.getpid(), *collector.worker_pids]
        ours = set().union(*map(socket_inodes, pids)) - before
        local = {row[6]: row[7:] for row in rows("/proc/net/unix")}
        internet = {
            row[9] for name in ("tcp", "tcp6") for row in rows(f"/proc/net/{name}")
        }
        assert ours
        assert not [inode for inode in ours if local[inode]]
        assert not ours & internet
