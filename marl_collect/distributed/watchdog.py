"""Waits for replies of actors, and detects those that die or hang."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from marl_collect.distributed.actor_handle import ActorHandle
from marl_collect.distributed.entry import WATCH
from marl_collect.distributed.results import Lost, why

_LOOK = 1.0  # Seconds between two checks of the actors.
_GRACE = 5.0  # Seconds in which an actor may detect its own hang first.


@final
@dataclass
class _Seen:
    """How many steps an actor had made, and when that number last grew."""

    steps: int = -1
    since: float = field(default_factory=time.monotonic)
    asked: Any = None


@final
class Watchdog:
    """Waits for replies, but not for actors that are dead or hang."""

    def __init__(self, ray: Any, timeout: float | None, start_timeout: float) -> None:
        """Set the deadlines.

        Args:
            ray: the module ``ray``.
            timeout: seconds without progress after which an actor counts as hung,
                None for never.
            start_timeout: seconds within which an actor must be ready.
        """
        self._ray = ray
        self._timeout = timeout
        self._start_timeout = start_timeout

    def first(self, pending: Mapping[Any, ActorHandle]) -> Any:
        """Return the first of these references that is done, in their order.

        Args:
            pending: each reference, and the actor whose reply it is.

        Raises:
            Lost: if an actor hangs or does not start.
        """
        seen = {actor.index: _Seen() for actor in pending.values()}
        while True:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=_LOOK)
            if done:
                return done[0]
            for actor in pending.values():
                self._look(actor, seen[actor.index])

    def _look(self, actor: ActorHandle, seen: _Seen) -> None:
        silent = time.monotonic() - seen.since
        if not self._is_up(actor):
            if silent > self._start_timeout:
                raise Lost(actor.index, self._not_ready())
            return
        if seen.asked is None:
            seen.asked = actor.call(WATCH, "steps")
        elif self._ray.wait([seen.asked], timeout=0)[0]:
            self._note(actor, seen)
        if self._timeout is not None and silent > self._timeout + _GRACE:
            raise Lost(actor.index, f"it has made no progress for {silent:.0f} seconds")

    def _note(self, actor: ActorHandle, seen: _Seen) -> None:
        try:
            steps = self._ray.get(seen.asked, timeout=_LOOK)
        except self._ray.exceptions.RayError as error:
            raise Lost(actor.index, why(error)) from None
        if steps != seen.steps:
            seen.steps, seen.since = steps, time.monotonic()
        seen.asked = None

    def _is_up(self, actor: ActorHandle) -> bool:
        return bool(self._ray.wait([actor.started], timeout=0)[0])

    def _not_ready(self) -> str:
        free = self._ray.available_resources()
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        return (
            f"it was not ready after {self._start_timeout:.0f} seconds. Free on the "
            f"cluster now: {have}. An actor needs what remote_configs says, by default "
            "one CPU per worker; raise start_timeout if it only starts slowly"
        )
