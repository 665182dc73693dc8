"""The entry point of a spawned worker."""

from typing import NoReturn

from marl_collect.processes import survival
from marl_collect.processes.bootstrap import run_worker


def main(command_fd: int, parent: int, *, tied_by_kernel: bool) -> NoReturn:
    """Tie this process to its parent's life, then run as a worker.

    Args:
        command_fd: our end of the command socket.
        parent: process id of the parent.
        tied_by_kernel: whether the thread that started us lives as long as its
            process, so that ``PR_SET_PDEATHSIG`` can be used.
    """
    survival.reset_signals()
    if tied_by_kernel:
        survival.die_with_parent(parent)
    survival.watch_parent(parent)
    run_worker(command_fd)
