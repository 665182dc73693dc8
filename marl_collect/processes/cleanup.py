"""Closes the pools that are still open when this process exits."""

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
        """End its processes within ``timeout`` seconds."""
        ...


_pools: Final = weakref.WeakSet[Closable]()
_exiting = False


def register(pool: Closable) -> None:
    """Close ``pool`` at exit if it is still open then."""
    _pools.add(pool)


def close_all() -> None:
    """Close every pool of this process. Called when the process exits."""
    global _exiting
    _exiting = True
    for pool in list(_pools):
        pool.close(timeout=_EXIT_SECONDS)


def ends_with_the_process(thread: threading.Thread) -> bool:
    """Whether the process is exiting and ``thread`` is a daemon."""
    return _exiting and thread.daemon


atexit.register(close_all)
