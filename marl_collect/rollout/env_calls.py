"""Calls of environments' methods between slots, and a log that makes them again.

A call changes an environment for good, so a process that takes over an environment
makes the calls of its predecessor first. If it replays running episodes, it makes the
calls of these episodes before the same frames.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from marl_collect.core.batch import EnvBatch
from marl_collect.rollout.episodes import Curriculum


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

    @property
    def key(self) -> str:
        """Equal for equal calls, whose arguments may have no hash."""
        return repr((self.rows, self.name, self.args, self.kwargs))

    def in_rows(self, rows: range) -> "EnvCall":
        """Return the call in some rows, which are then counted from 0."""
        inside = (row - rows.start for row in self.rows if row in rows)
        return replace(self, rows=tuple(inside))


Outcome = tuple[Any, Exception | None]
"""What a call returned in one environment, and what it raised."""
CallsMark = tuple[list[tuple[EnvCall, int | None]], int]
"""The calls before a moment, each with its age in frames, and the number of calls."""


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
class CallLog:
    """The calls of one rollout, in order.

    Attributes:
        pending: calls of a loaded state that are due after the next slot.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        # By number, with the frame before which the call was made; None if all running
        # episodes began later.
        self._entries: dict[int, tuple[EnvCall, int | None]] = {}
        # Numbers of equal calls, the oldest first, so that a call is not compared with
        # all others.
        self._equal: defaultdict[str, deque[int]] = defaultdict(deque)
        self._clock = 0
        self._count = 0
        self._began = 0  # All running episodes began after the calls before this one.
        self.pending: list[EnvCall] = []

    def add(self, call: EnvCall, *, longest: int | None) -> None:
        """Note a call that was made now.

        An equal, earlier one is dropped, unless a running episode needs it.

        Args:
            call: the call.
            longest: frames of the longest running episode; None if none has begun.
        """
        begin = None if longest is None else self._clock - longest

        def precedes_episodes(number: int) -> bool:
            frame = self._entries[number][1]
            if begin is None or frame is None or number < self._began:
                return True
            return frame < begin

        equal = self._equal[call.key]
        # The running episodes began after the last of those that precede them.
        needed = 0 if begin is None else 1
        while len(equal) > needed and precedes_episodes(equal[needed]):
            del self._entries[equal.popleft()]
        self._append(call, None if longest is None else self._clock)

    def _append(self, call: EnvCall, frame: int | None) -> None:
        self._entries[self._count] = call, frame
        self._equal[call.key].append(self._count)
        self._count += 1

    def passed(self, frames: int) -> None:
        """Note that a slot was filled."""
        self._clock += frames

    def began(self) -> None:
        """Note that all environments begin new episodes."""
        self._began = self._count

    def mark(self) -> CallsMark:
        """Return this moment, for ``state``."""
        made: list[tuple[EnvCall, int | None]] = []
        for number, (call, frame) in self._entries.items():
            age = None
            if frame is not None and number >= self._began:
                age = self._clock - frame
            made.append((call, age))
        return made, self._count

    def state(self, mark: CallsMark) -> dict[str, Any]:
        """Return the calls as plain data.

        Returns:
            ``made``: those before the mark, with ``age``, their distance to it in
            frames, or None; ``later``: those after it.
        """
        made, count = mark
        later = [call for n, (call, _) in self._entries.items() if n >= count]
        return {
            "made": [{**vars(call), "age": age} for call, age in made],
            "later": [dict(vars(call)) for call in (*self.pending, *later)],
        }

    def load(self, state: Mapping[str, Any]) -> list[tuple[EnvCall, int | None]]:
        """Take the calls of a state; return those to make again, with their ages."""
        self._entries, self._equal = {}, defaultdict(deque)
        self._clock = self._count = self._began = 0
        made = []
        for entry in state["made"]:
            age = entry["age"]
            call = EnvCall(**{k: v for k, v in entry.items() if k != "age"})
            self._append(call, None if age is None else -age)
            made.append((call, age))
        self.pending = [EnvCall(**entry) for entry in state["later"]]
        return made


def add_call(calls: dict[str, EnvCall], call: EnvCall) -> None:
    """Add a call to others by key, in the place of an equal, earlier one."""
    calls.pop(call.key, None)
    calls[call.key] = call


def calls_of(state: Mapping[str, Any]) -> dict[str, EnvCall]:
    """Return all calls of ``CallLog.state`` by key, in order."""
    log = CallLog()
    calls: dict[str, EnvCall] = {}
    for call in (*(call for call, _ in log.load(state)), *log.pending):
        add_call(calls, call)
    return calls


def joined_calls(
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


def check_call(engine: EnvBatch, call: EnvCall) -> None:
    """Check a call of a user in worlds of a simulator.

    Raises:
        AttributeError: if the method steps them.
        ValueError: if it is to be called for only some of them.
    """
    name = engine.description.name
    if engine.one_simulator and call.name in {"begin", "advance"}:
        raise AttributeError(
            f"{call.name}() steps the worlds of {name}: the collector does that."
        )
    if engine.one_simulator and len(call.rows) < engine.size:
        raise ValueError(
            f"The {engine.size} worlds of {name} are one simulator, whose methods are "
            "called for all of them."
        )


def make(engine: EnvBatch, call: EnvCall) -> list[Outcome]:
    """Make a call; return an outcome per environment, or one for all worlds."""
    outcomes: list[Outcome] = []
    for row in call.rows[:1] if engine.one_simulator else call.rows:
        try:
            # An environment may keep its arguments, and change them.
            args, kwargs = copy.deepcopy((call.args, dict(call.kwargs)))
            outcomes.append((engine.call(row, call.name, args, kwargs), None))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            outcomes.append((None, error))
    return outcomes


def make_again(engine: EnvBatch, calls: Iterable[EnvCall]) -> None:
    """Make calls that were made before, in another process or an earlier one."""
    for call in calls:
        for _, error in make(engine, call):
            if error is not None:
                error.add_note(f"The call of {call.name}() was made once more.")
                raise error


def set_task(
    engine: EnvBatch,
    k: int,
    curriculum: Curriculum,
    seed: int,
    number: int,
    level: int,
) -> None:
    """Tell environment k the task of the episode that it begins next.

    Args:
        engine: the environments.
        k: index of the environment in ``engine``.
        curriculum: returns the task.
        seed: of the episode.
        number: of the episode in its environment.
        level: of the curriculum.
    """
    try:
        # An environment may change it.
        task = copy.deepcopy(curriculum(seed, number, level))
    except Exception as error:
        error.add_note(
            f"The error was raised by curriculum(seed={seed}, episode={number}, "
            f"level={level})."
        )
        raise
    if engine.one_simulator:
        engine.call(k, "set_task", (k, task), {})
        engine.call(k, "require_begin", (k,), {})
    else:
        engine.call(k, "set_task", (task,), {})
