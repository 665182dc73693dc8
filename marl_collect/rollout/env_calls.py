"""Calls of environments' methods between slots, and a log that makes them again.

A call changes an environment for good, so a process that takes over an environment
makes the calls of its predecessor first. If it replays running episodes, it makes the
calls of these episodes before the same frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final


@final
@dataclass(frozen=True)
class EnvCall:
    """A method to call in some environments.

    Attributes:
        rows: indices of the environments within the worker or rollout.
        name: of the method.
        args: positional arguments; plain data, as all arguments.
        kwargs: keyword arguments.
    """

    rows: tuple[int, ...]
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def in_rows(self, rows: range) -> "EnvCall":
        """Return the call in some rows, which are then counted from 0."""
        inside = (row - rows.start for row in self.rows if row in rows)
        return replace(self, rows=tuple(inside))


Outcome = tuple[Any, Exception | None]
"""What a call returned in one environment, and what it raised."""


def returned(call: EnvCall, failed: Sequence[bool]) -> EnvCall:
    """Return the call in those of its environments in which it raised no error.

    Args:
        call: in some environments.
        failed: for each of them, or once for all worlds of a simulator.
    """
    if len(failed) < len(call.rows):
        return replace(call, rows=() if any(failed) else call.rows)
    pairs = zip(call.rows, failed, strict=True)
    return replace(call, rows=tuple(row for row, error in pairs if not error))


@final
@dataclass(frozen=True)
class _Entry:
    """A call that was made.

    Attributes:
        call: the call.
        number: how many calls were made before it.
        frame: before which it was made; None if all running episodes began later.
    """

    call: EnvCall
    number: int
    frame: int | None


@final
@dataclass(frozen=True)
class CallsMark:
    """A moment of a log."""

    entries: tuple[_Entry, ...]
    clock: int
    count: int


@final
class CallLog:
    """The calls of one rollout, in order.

    Attributes:
        pending: calls of a loaded state that are due after the next slot.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._entries: list[_Entry] = []
        self._clock = 0
        self._count = 0
        self.pending: list[EnvCall] = []

    def add(self, call: EnvCall, *, longest: int | None) -> None:
        """Note a call that was made now.

        An equal, earlier one is dropped, unless a running episode needs it.

        Args:
            call: the call.
            longest: frames of the longest running episode; None if none has begun.
        """
        begin = None if longest is None else self._clock - longest
        before = [
            entry
            for entry in self._entries
            if entry.call == call
            and (begin is None or entry.frame is None or entry.frame < begin)
        ]
        # The running episodes began after the last of them.
        dropped = before if begin is None else before[:-1]
        self._entries = [entry for entry in self._entries if entry not in dropped]
        frame = None if longest is None else self._clock
        self._entries.append(_Entry(call, self._count, frame))
        self._count += 1

    def passed(self, frames: int) -> None:
        """Note that a slot was filled."""
        self._clock += frames

    def began(self) -> None:
        """Note that all environments begin new episodes."""
        self._entries = [replace(entry, frame=None) for entry in self._entries]

    def mark(self) -> CallsMark:
        """Return this moment, for ``state``."""
        return CallsMark(tuple(self._entries), self._clock, self._count)

    def state(self, mark: CallsMark) -> dict[str, Any]:
        """Return the calls as plain data.

        Returns:
            ``made``: those before the mark, with ``age``, their distance to it in
            frames, or None; ``later``: those after it.
        """
        later = [e.call for e in self._entries if e.number >= mark.count]
        return {
            "made": [
                {**vars(e.call), "age": _distance(e.frame, mark.clock)}
                for e in mark.entries
            ],
            "later": [dict(vars(call)) for call in (*self.pending, *later)],
        }

    def load(self, state: Mapping[str, Any]) -> list[tuple[EnvCall, int | None]]:
        """Take the calls of a state; return those to make again, with their ages."""
        made = []
        for entry in state["made"]:
            age = entry["age"]
            call = EnvCall(**{k: v for k, v in entry.items() if k != "age"})
            made.append((call, age))
        self._clock, self._count = 0, len(made)
        self._entries = [
            _Entry(call, number, _distance(age, 0))
            for number, (call, age) in enumerate(made)
        ]
        self.pending = [EnvCall(**entry) for entry in state["later"]]
        return made


def calls_of(state: Mapping[str, Any]) -> list[EnvCall]:
    """Return all calls of ``CallLog.state``, in order."""
    log = CallLog()
    return [*(call for call, _ in log.load(state)), *log.pending]


def _distance(frame: int | None, clock: int) -> int | None:
    return None if frame is None else clock - frame


def joined(
    states: Sequence[Mapping[str, Any]], firsts: Sequence[int]
) -> dict[str, Any]:
    """Return the calls of several rollouts, whose rows begin at ``firsts``."""
    return {
        kind: [
            entry | {"rows": tuple(row + first for row in entry["rows"])}
            for state, first in zip(states, firsts, strict=True)
            for entry in state[kind]
        ]
        for kind in ("made", "later")
    }


def part_of(state: Mapping[str, Any], rows: range) -> dict[str, Any]:
    """Return the calls in some rows, which are then counted from 0."""
    parts: dict[str, Any] = {"made": [], "later": []}
    for kind, entries in parts.items():
        for entry in state[kind]:
            inside = tuple(row - rows.start for row in entry["rows"] if row in rows)
            if inside:
                entries.append(entry | {"rows": inside})
    return parts
