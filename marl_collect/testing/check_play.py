"""Plays episodes of an environment, to check and compare them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Field, Key, allocate
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.core.seeding import Purpose, generator_for
from marl_collect.testing.check_rows import Rules, name_of

Array = NDArray[Any]
Snapshot = dict[Key, Array]


class StopError(Exception):
    """A finding after which the check cannot continue."""


def attempt(what: str, call: Callable[[], None]) -> None:
    """Call ``call``.

    Raises:
        StopError: if it raises; ``what`` says what was called.
    """
    try:
        call()
    except Exception as error:
        raise StopError(f"{what} raised {type(error).__name__}: {error}") from error


@final
class Play:
    """One environment and the memory that it writes."""

    def __init__(self, env: MultiAgentEnv | EnvWrapper, steps: int) -> None:
        from marl_collect.core.random_actions import samplers

        self.description = env.description
        self._env = env
        self._steps = steps
        self._row = allocate(self.description.row())
        self._samplers = list(samplers(self.description))
        self._bind(self._row)

    def rules(self, seed: int) -> Iterator[str]:
        """Play an episode and check the row after every call."""
        rules = Rules(self.description, self._row)
        random = generator_for(seed, Purpose.CHECKED_ACTIONS)
        self._reset(seed)
        yield from rules.after_reset()
        for finding in self._env.audit():
            yield f"After reset_row({seed}): {finding}"
        limit = self.description.time_limit
        for step in range(1, self._steps + 1):
            if step - 1 == limit:
                yield f"An episode is longer than the time limit of {limit} steps."
            self._act(random)
            chosen = {s.key: self._row[s.key].copy() for s in self._samplers}
            self._step()
            for finding in (
                *rules.after_step(),
                *self._changed(chosen),
                *self._env.audit(),
            ):
                yield f"Step {step} of seed {seed}: {finding}"
            if self._row["done",][0]:
                return

    def episode(self, seed: int, poison: int = 0) -> list[Snapshot]:
        """Play an episode and return copies of the row after every call.

        The arguments are those of ``frames``.
        """
        return list(self.frames(seed, poison))

    def frames(self, seed: int, poison: int = 0) -> Iterator[Snapshot]:
        """Play an episode and yield a copy of the row after every call.

        Args:
            seed: of the episode and its actions.
            poison: value of the memory before the reset, and before each step in all
                arrays that the step must write.
        """
        for array in self._row.values():
            array.fill(poison)
        random = generator_for(seed, Purpose.CHECKED_ACTIONS)
        outcome = self.description.outcome()
        observed = self.description.observed()
        self._reset(seed)
        # A reset does not write rewards.
        yield {key: self._row[key].copy() for key in observed}
        for _ in range(self._steps):
            self._act(random)
            for key in outcome:
                self._row[key].fill(poison)
            self._step()
            yield {k: self._row[k].copy() for k in (*observed, *outcome)}
            if self._row["done",][0]:
                break

    def values_before_cast(self, seed: int) -> Iterator[str]:
        """Yield values that the dtype of their space cannot hold.

        Integer observations are bound to float64 arrays meanwhile, which do not cast.
        """
        exact = {
            key: field
            for key, field in self.description.observed().items()
            if field.dtype.kind in "iu"
            and (key[0] in self.description.root or key[1:2] == ("observation",))
        }
        if not exact:
            return
        wide = np.dtype(np.float64)
        row = self._row | allocate({k: Field(f.shape, wide) for k, f in exact.items()})
        random = generator_for(seed, Purpose.CHECKED_ACTIONS)
        self._bind(row)
        self._reset(seed)
        for _ in range(min(self._steps, 10)):
            yield from _lossy(row, exact)
            self._act(random)
            self._step()
            if row["done",][0]:
                break
        yield from _lossy(row, exact)
        self._bind(self._row)

    def stale_memory(self, seed: int) -> Iterator[str]:
        """Check that the environment does not use memory that was bound before."""
        old = self._row
        expected = self.episode(seed)
        self._row = allocate(self.description.row())
        self._bind(self._row)
        for array in old.values():
            array.fill(1)
        actual = self.episode(seed)
        for key, array in old.items():
            if not (array == 1).all():
                yield f"{name_of(key)} is still written to memory bound before."
        if self.description.repeats:
            for problem in differences(expected, actual):
                yield f"After a second bind, {problem}."

    def _changed(self, chosen: Snapshot) -> Iterator[str]:
        for key, actions in chosen.items():
            if not np.array_equal(self._row[key], actions):
                yield (
                    f"step_row() changes {name_of(key)}, which is recorded after it: "
                    "change a copy."
                )

    def _bind(self, row: dict[Key, Array]) -> None:
        attempt("bind", lambda: self._env.bind(row))

    def _reset(self, seed: int) -> None:
        attempt(f"reset_row({seed})", lambda: self._env.reset_row(seed))

    def _step(self) -> None:
        attempt("step_row", self._env.step_row)

    def _act(self, random: np.random.Generator) -> None:
        for sampler in self._samplers:
            noise = random.random(sampler.noise_shape)
            mask = None if sampler.mask_key is None else self._row[sampler.mask_key]
            self._row[sampler.key][...] = sampler.actions(noise, mask)


def _lossy(row: Mapping[Key, Array], fields: Mapping[Key, Field]) -> Iterator[str]:
    for key, field in fields.items():
        with np.errstate(invalid="ignore"):
            cast = row[key].astype(field.dtype)
        if not np.array_equal(cast, row[key]):
            value = row[key][cast != row[key]].flat[0]
            yield (
                f"{name_of(key)} has the dtype {field.dtype}, which cannot hold the "
                f"value {value} that the environment wrote."
            )


def differences(one: list[Snapshot], two: list[Snapshot]) -> Iterator[str]:
    """Yield the first difference at each key, and a difference in length."""
    if len(one) != len(two):
        yield f"it took {len(two) - 1} steps instead of {len(one) - 1}"
    known: set[Key] = set()
    for step, (left, right) in enumerate(zip(one, two, strict=False)):
        for key, array in left.items():
            if key not in known and not np.array_equal(
                array, right[key], equal_nan=array.dtype.kind == "f"
            ):
                known.add(key)
                where = "after the reset" if step == 0 else f"in step {step}"
                yield f"{name_of(key)} differs {where}"
