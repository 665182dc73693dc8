"""The Ray actor class, which is importable without torch.

Importing torch takes most of an actor's start, and the fork server of its workers
imports it too. The server is started first, so that both import at the same time.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from marl_collect.processes import import_guard
from marl_collect.processes.launcher import start_server

WORK = "work"
WATCH = "watch"
GROUPS = {WORK: 1, WATCH: 2}
"""Threads per group: orders run one by one, and progress checks beside them."""


@final
class Entry:
    """Forwards calls to an ``Actor``."""

    def __init__(self, preload: Sequence[str]) -> None:
        """Import the libraries.

        Args:
            preload: modules for the workers' fork server; empty without workers.
        """
        import_guard.mark_process("An actor of a RayCollector")
        if preload:
            with suppress(OSError):  # The first worker fails too, and reports it.
                start_server(preload)
        from marl_collect.distributed.actor import Actor

        self._actor = Actor()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the actor."""
        return getattr(self._actor, name)(*args)
