"""Closes pools and environments that are still open when this process exits."""

import atexit
import contextlib
import threading
import weakref
from typing import Any, Final

# Imported first, so that its exit hook runs after ours: pools, then servers.
import marl_collect.processes.launcher as _launcher  # noqa: F401

_EXIT_SECONDS: Final = 3.0


_open: Final = weakref.WeakSet[Any]()
_exiting = False


def register(owner: Any) -> None:
    """Close ``owner`` at exit, while modules still have what its environments use.

    Args:
        owner: of processes or environments. ``close(timeout=seconds)`` ends or closes
            them, and may be called twice.
    """
    _open.add(owner)


def close_all() -> None:
    """Close what this process owns, even if an error is raised. Called at exit."""
    global _exiting
    _exiting = True
    with contextlib.ExitStack() as stack:
        for owner in list(_open):
            stack.callback(owner.close, timeout=_EXIT_SECONDS)


def ends_with_the_process() -> bool:
    """Whether the process is exiting and this thread is a daemon."""
    return _exiting and threading.current_thread().daemon


atexit.register(close_all)
