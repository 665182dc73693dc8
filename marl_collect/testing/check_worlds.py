"""Plays the worlds of a ``BatchedEnv``, to check and compare them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Literal, TypeVar, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.batched import (
    BatchedEnv,
    Observations,
    Step,
    with_arrays,
)
from marl_collect.core.description import Key
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.core.seeding import Purpose, episode_seeds, generator_for
from marl_collect.testing.check_play import Snapshot, attempt, differences
from marl_collect.testing.check_rows import Rules
from marl_collect.testing.check_sharing import ELSEWHERE

Array = NDArray[Any]
Event = tuple[Literal["begin", "step"], list[int]]
T = TypeVar("T")

_COMPARED = 64
"""Number of worlds whose data are kept and compared."""
_RULED = 8
"""Number of worlds whose rows are checked after every call."""
_RESTART = 3
"""Step before which some worlds begin to play again in `WorldPlay.restarted`."""
_TABLE = (97, 61)
"""Steps and worlds after which the noise of actions repeats. They are primes."""


@final
class WorldPlay:
    """A batch of worlds and the memory that the engine writes.

    World ``k`` plays the stream ``k``: a sequence of seeds and actions.
    """

    def __init__(
        self, env: BatchedEnv | EnvWrapper, seed: int, episodes: int, steps: int
    ) -> None:
        """Play at most ``episodes`` episodes of ``steps`` steps in each world."""
        from marl_collect.core.random_actions import samplers

        self.description = env.description
        # What a wrapper passes on is checked when its simulator is.
        self._watched = _Watched(env) if isinstance(env, BatchedEnv) else None
        self._engine = (self._watched or env).engine()
        self._memory = self._engine.allocate()
        self._engine.bind(self._memory)
        self._seed, self._episodes, self._most = seed, episodes, episodes * steps
        random = generator_for(seed, Purpose.CHECKED_ACTIONS)
        self._samplers = [
            (sampler, random.random((*_TABLE, *sampler.noise_shape)))
            for sampler in samplers(self.description)
        ]
        (self._size,) = env.batch_size
        few = np.linspace(0, self._size - 1, min(self._size, _COMPARED))
        self._compared = few.astype(np.int64)

    def rules(self) -> Iterator[str]:
        """Play, and check rows and arrays after every call."""
        few = self._compared[:: -(-len(self._compared) // _RULED)].tolist()
        rows = {k: {n: a[k] for n, a in self._memory.items()} for k in few}
        rules = {k: Rules(self.description, row) for k, row in rows.items()}
        last: dict[int, Snapshot] = {}
        resets = varied = 0
        for call, (kind, worlds) in enumerate(self._play(0)):
            for k, rule in rules.items():
                if kind == "step":
                    findings = rule.after_step()
                elif k in worlds:
                    findings = rule.after_reset()
                else:
                    continue
                for finding in findings:
                    yield f"Call {call}, {kind}, world {k}: {finding}"
            if self._watched is not None:
                yield from self._watched.take()
            if kind == "step":
                last = {k: self._look(k) for k in worlds}
                continue
            for k, final_look in last.items():
                resets += 1
                varied += not _equal(final_look, self._look(k))
        if resets and not varied:
            yield (
                "The last observation of every episode equals the first one of the "
                "next episode: advance() must return the observations before a world "
                "begins anew, and if the simulator resets itself, the new ones as "
                "first=."
            )

    def history(self, poison: int = 0, **keywords: Any) -> list[Snapshot]:
        """Play, and return copies of the data of every step.

        The arguments are those of ``frames``.
        """
        return list(self.frames(poison, **keywords))

    def frames(
        self,
        poison: int = 0,
        *,
        restart: Array | None = None,
        shift: int = 0,
    ) -> Iterator[Snapshot]:
        """Play, and yield the data of the compared worlds in every step.

        Args:
            poison: what the memory has before it is written. If it is not 0, the
                simulator gets copies of actions, which are not written again.
            restart: worlds that play their stream again from step ``_RESTART`` on.
            shift: how much further the worlds are that play the streams.
        """
        rows = (self._compared + shift) % self._size
        root: Snapshot = {}
        following = [*self.description.observed(), *self.description.outcome()]
        for kind, _ in self._play(poison, restart, shift):
            if kind == "begin":
                root = self._rows("root", list(self.description.observed()), rows)
            else:
                frame = root | self._rows("next", following, rows)
                yield frame
                root = {("root", *k[1:]): a for k, a in frame.items()}
                root = {k: a for k, a in root.items() if k[1:] not in self._outcome}

    def repeated(self, twin: "WorldPlay") -> Iterator[str]:
        """Play again in several ways, and compare.

        Args:
            twin: another batch of the same factory.
        """
        expected = self.history()
        alone = True
        for other, which in ((self, "again"), (twin, "in another batch")):
            for problem in differences(expected, other.history()):
                alone = False
                yield (
                    "Episodes depend on more than their seeds and their actions: "
                    f"played {which}, {problem}."
                )
        if not alone:
            return
        # The worlds of the twin play other streams, so they end in other steps.
        turns = zip_longest(self.frames(), twin.frames(shift=1))
        beside = [frame for frame, _ in turns if frame is not None]
        for problem in differences(expected, beside):
            yield (
                "Two batches of one process change each other's episodes: played step "
                f"by step in turn, {problem}. {ELSEWHERE}"
            )
        for problem in differences(expected, self.history(poison=1)):
            yield (
                "Some memory is not written, or is read later, such as an array of "
                f"actions: with other contents, {problem}."
            )
        yield from self._restarted(expected)
        for problem in differences(expected, self.history(shift=1)):
            yield f"Episodes depend on the index of their world: {problem}."

    def _restarted(self, expected: list[Snapshot]) -> Iterator[str]:
        """Let every other world begin again in the middle."""
        which = np.arange(self._size) % 2 == 0
        actual = self.history(restart=which)
        again = which[self._compared]
        whole = min(len(expected), len(actual))
        if not again.all():
            pair = (_part(expected[:whole], ~again), _part(actual[:whole], ~again))
            for problem in differences(*pair):
                yield (
                    "begin(which, seeds) changes worlds that are not in which: when "
                    f"others begin before step {_RESTART + 1}, {problem}."
                )
        part = min(len(expected), max(0, len(actual) - _RESTART))
        late = _part(actual[_RESTART:][:part], again)
        for problem in differences(_part(expected[:part], again), late):
            yield (
                "begin(which, seeds) does not begin the episode of its seed, if only "
                f"some worlds begin: {problem}."
            )

    @property
    def _outcome(self) -> set[Key]:
        return set(self.description.outcome())

    def _play(
        self, poison: int, restart: Array | None = None, shift: int = 0
    ) -> Iterator[Event]:
        """Play; yield the worlds that began, or that ended in a step."""
        clock = np.zeros(self._size, np.int64)
        episodes = np.zeros(self._size, np.int64)
        streams = (np.arange(self._size) - shift) % self._size
        if self._watched is not None:
            self._watched.copies = bool(poison)
        for array in self._memory.values():
            array.fill(poison)
        worlds = list(range(self._size))
        for step in range(self._most):
            if restart is not None and step == _RESTART:
                again = np.flatnonzero(restart)
                clock[again] = episodes[again] = 0
                worlds = np.union1d(worlds, again).astype(np.int64).tolist()
            if worlds:
                self._begin(worlds, streams, episodes)
                yield "begin", worlds
            self._act(clock, streams)
            for key in self._outcome:
                self._memory[key].fill(poison)
            attempt("advance", self._engine.step)
            clock += 1
            worlds = np.flatnonzero(self._memory["done",][:, 0]).tolist()
            episodes[worlds] += 1
            yield "step", worlds
            if (episodes >= self._episodes).all():
                return

    def _begin(self, worlds: list[int], streams: Array, episodes: Array) -> None:
        seeds = episode_seeds(self._seed, streams[worlds], episodes[worlds]).tolist()
        attempt("begin", lambda: self._engine.reset(worlds, seeds))

    def _act(self, clock: Array, streams: Array) -> None:
        for sampler, table in self._samplers:
            noise = table[clock % _TABLE[0], streams % _TABLE[1]]
            mask = None if sampler.mask_key is None else self._memory[sampler.mask_key]
            self._memory[sampler.key][...] = sampler.actions(noise, mask)

    def _look(self, k: int) -> Snapshot:
        return {
            key: self._memory[key][k].copy()
            for key in self.description.observed()
            if key[1:2] == ("observation",)
        }

    def _rows(self, where: str, keys: list[Key], rows: Array) -> Snapshot:
        return {(where, *key): self._memory[key][rows] for key in keys}


@final
class _Watched(BatchedEnv):
    """Forwards to a simulator, and notes what it does to arrays.

    Attributes:
        copies: whether the simulator gets copies of actions.
    """

    copies = False

    def __init__(self, env: BatchedEnv) -> None:
        super().__init__(env.description, env.worlds)
        self._simulator = with_arrays(env)
        self._findings: list[str] = []

    def take(self) -> list[str]:
        """Return what was found since the last call."""
        findings, self._findings = self._findings, []
        return findings

    @override
    def begin(self, which: Array | None, seeds: Array) -> Observations:
        arguments = [array for array in (which, seeds) if array is not None]
        return self._unchanged(
            "begin()", arguments, lambda: self._simulator.begin(which, seeds)
        )

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        if self.copies:
            actions = copy.deepcopy(actions)
        arguments = list(_arrays(actions))
        return self._unchanged(
            "advance()", arguments, lambda: self._simulator.advance(actions)
        )

    def _unchanged(self, what: str, arrays: list[Array], call: Callable[[], T]) -> T:
        before = [array.copy() for array in arrays]
        result = call()
        for array, original in zip(arrays, before, strict=True):
            if not np.array_equal(array, original, equal_nan=array.dtype.kind == "f"):
                self._findings.append(f"{what} changes an array that it was given.")
        return result


def _arrays(nested: Mapping[str, Any]) -> Iterator[Array]:
    for value in nested.values():
        if isinstance(value, Mapping):
            yield from _arrays(value)
        else:
            yield value


def _equal(one: Snapshot, two: Snapshot) -> bool:
    return all(np.array_equal(array, two[key]) for key, array in one.items())


def _part(history: list[Snapshot], rows: Array) -> list[Snapshot]:
    return [{key: array[rows] for key, array in frame.items()} for frame in history]
