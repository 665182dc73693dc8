"""The connections of workers cannot be opened by anybody else."""

import os
import socket

import psutil
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector


def sockets_of(pid: int) -> set[tuple[int, int, str]]:
    sockets = psutil.Process(pid).net_connections("all")
    return {(s.fd, s.family, str(s.laddr)) for s in sockets}


def test_no_socket_of_a_pool_has_a_name() -> None:
    before = sockets_of(os.getpid())
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=4) as collector:
        collector.next()
        pids = [os.getpid(), *collector.worker_pids]
        ours = set().union(*map(sockets_of, pids)) - before
        assert {(family, name) for _, family, name in ours} == {(socket.AF_UNIX, "")}
