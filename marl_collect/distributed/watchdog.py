"""Waiting for actors that may die or hang: on data, on Ray's word, on progress."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from marl_collect.distributed.actor_handle import Member
from marl_collect.distributed.entry import WATCH
from marl_collect.distributed.results import Lost, why

_LOOK = 1.0  # Seconds between two looks at those that are waited for.
_GRACE = 5.0  # Seconds in which an actor may find out itself that it hangs.


@final
@dataclass
class _Seen:
    """How far an actor had come, and when it last came further."""

    steps: int = -1
    since: float = field(default_factory=time.monotonic)
    asked: Any = None


@final
class Vigil:
    """Waits for replies, and for nothing that will not come."""

    def __init__(self, ray: Any, timeout: float | None, start_timeout: float) -> None:
        """Wait.

        Args:
            ray: the module.
            timeout: seconds without progress after which an actor counts as hung,
                None for never.
            start_timeout: seconds in which an actor must be ready.
        """
        self._ray = ray
        self._timeout = timeout
        self._start_timeout = start_timeout

    def first(self, pending: Mapping[Any, Member]) -> Any:
        """Return the first of these references that is done, in their order.

        Args:
            pending: reference to the actor that it is awaited from.

        Raises:
            Lost: if an actor hangs or does not start.
        """
        seen = {member.index: _Seen() for member in pending.values()}
        while True:
            done, _ = self._ray.wait(list(pending), num_returns=1, timeout=_LOOK)
            if done:
                return done[0]
            for member in pending.values():
                self._look(member, seen[member.index])

    def _look(self, member: Member, seen: _Seen) -> None:
        silent = time.monotonic() - seen.since
        if not self._is_up(member):
            if silent > self._start_timeout:
                raise Lost(member.index, self._not_ready())
            return
        if seen.asked is None:
            seen.asked = member.call(WATCH, "steps")
        elif self._ray.wait([seen.asked], timeout=0)[0]:
            self._note(member, seen)
        if self._timeout is not None and silent > self._timeout + _GRACE:
            raise Lost(
                member.index, f"it has made no progress for {silent:.0f} seconds"
            )

    def _note(self, member: Member, seen: _Seen) -> None:
        try:
            steps = self._ray.get(seen.asked, timeout=_LOOK)
        except self._ray.exceptions.RayError as error:
            raise Lost(member.index, why(error)) from None
        if steps != seen.steps:
            seen.steps, seen.since = steps, time.monotonic()
        seen.asked = None

    def _is_up(self, member: Member) -> bool:
        return bool(self._ray.wait([member.started], timeout=0)[0])

    def _not_ready(self) -> str:
        free = self._ray.available_resources()
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        return (
            f"it was not ready after {self._start_timeout:.0f} seconds. Free on the "
            f"cluster now: {have}; an actor takes what remote_configs says, else a CPU "
            "for each worker"
        )
