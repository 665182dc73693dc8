"""The first lines of a worker that is a fresh interpreter."""

from typing import NoReturn

from marl_collect.processes import survival
from marl_collect.processes.bootstrap import run_worker


def main(command_fd: int, parent: int, *, tied_by_kernel: bool) -> NoReturn:
    """See to it that this process dies with its parent, then be a worker.

    Args:
        command_fd: our end of the command socket.
        parent: process id of whoever started us.
        tied_by_kernel: whether the thread that started us lives as long as its
            process, so that the kernel can be asked to kill us with it.
    """
    survival.reset_signals()
    if tied_by_kernel:
        survival.die_with_parent(parent)
    survival.watch_parent(parent)
    run_worker(command_fd)
