"""Closing the pools that are still open when this process exits."""

import atexit
import threading
import weakref
from typing import Final, Protocol

# Imported first, so that its exit hook runs after ours: pools, then servers.
import marl_collect.processes.launcher as _launcher  # noqa: F401

_EXIT_SECONDS: Final = 3.0


class Closable(Protocol):
    """A pool."""

    def close(self, timeout: float = ...) -> object:
        """End its processes within so many seconds."""
        ...


_pools: Final = weakref.WeakSet[Closable]()
_exiting = False


def register(pool: Closable) -> None:
    """Remember a pool until it is closed or collected."""
    _pools.add(pool)


def close_all() -> None:
    """Close every pool of this process, which is about to end."""
    global _exiting
    _exiting = True
    for pool in list(_pools):
        pool.close(timeout=_EXIT_SECONDS)


def ends_with_the_process(thread: threading.Thread) -> bool:
    """Whether the process is exiting, and takes this thread along."""
    return _exiting and thread.daemon


atexit.register(close_all)
