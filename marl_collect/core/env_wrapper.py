"""``EnvWrapper``: changes to an environment of any family.

A wrapper has a row of its own. Keys that it does not change are the same arrays for the
wrapped environment, so they are not copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.batch import EnvBatch, SerialBatch, SimulatorBatch
from marl_collect.core.batched import BatchedEnv
from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    Key,
    Row,
    allocate,
    bytes_of,
    leaf_spaces,
)
from marl_collect.core.env import MultiAgentEnv, TensorDictEnv, factory_for

Space = spaces.Space[Any]


class EnvWrapper(TensorDictEnv):
    """Base class of wrappers, which change what agents observe, do or are rewarded for.

    A subclass overrides some of three methods, which run around the resets and steps of
    the wrapped environment: ``after_reset``, ``before_step`` and ``after_step``. They
    work on arrays in place:

    - ``self.row`` has the arrays that policies and batches see, by key: ``(g,
      "observation", ...)``, ``(g, "action")``, ``(g, "reward")``, ``(g, "mask")`` and
      so on, as in ``EnvDescription.row()``. Arrays of a group of n agents are ``[n,
      ...]``. If the wrapped environment is a ``BatchedEnv`` of K worlds, all arrays
      have a first dimension K. Code that counts dimensions from the last one, as in
      ``[..., 0]``, works for both.
    - ``self.env_row`` has those of the wrapped environment. The arrays of both are the
      same, except for keys whose space the wrapper changes, and those of ``writes``.

    A wrapper writes the observations that it adds or changes after every reset and
    every step. It may add to rewards in place, because every step writes them anew.
    Rows of agents that have been done since an earlier step become zeros again
    afterwards, so ``after_step`` need not treat them differently.

    An episode must depend only on its seed and its actions: begin all state in
    ``after_reset``, and derive random numbers from its seed. Then resumed runs, replays
    and all collectors work as without the wrapper; ``check_env`` tests that.

    Public attributes of the wrapped environment are attributes of the wrapper too.

    Example:
        >>> class Equality(EnvWrapper):
        ...     def after_step(self):
        ...         rewards = self.row["agent", "reward"]
        ...         rewards -= 0.1 * abs(rewards - rewards.mean(-2, keepdims=True))
        >>> factory = lambda: Equality(PettingZooEnv("simple_spread_v3"))

    Attributes:
        env: the wrapped environment.
        row: arrays that policies and batches see.
        env_row: arrays that the wrapped environment reads and writes.
    """

    row: Mapping[Key, NDArray[Any]]
    env_row: Mapping[Key, NDArray[Any]]

    def __init__(
        self,
        env: "MultiAgentEnv | BatchedEnv | EnvWrapper",
        description: EnvDescription | None = None,
        *,
        observe: Mapping[str, Mapping[str, Space]] | None = None,
        writes: Iterable[Key] = (),
    ) -> None:
        """Own ``env``; ``close`` closes it.

        Args:
            env: the environment to wrap, which may be a wrapper.
            description: groups and spaces, where they differ from those of ``env``. It
                needs the same groups and agents. None: those of ``env``. The name
                becomes ``"Wrapper(name)"``, because a wrapped environment is another
                one.
            observe: observations to add: by group, the space of one agent by name. They
                are at ``(group, "observation", name)``. If the observations of ``env``
                are not a Dict, they move to ``(group, "observation", "observation")``.
            writes: keys of observations or actions that the wrapper writes although
                their space stays the same. ``self.row`` and ``self.env_row`` then have
                an array each.

        Raises:
            TypeError: if ``env`` is neither a ``MultiAgentEnv``, nor a ``BatchedEnv``,
                nor a wrapper.
            ValueError: for an unknown group or key, or a name that the observations
                have already.
        """
        # First, so that __getattr__ finds it.
        self.env = _require_env(env, type(self).__name__)
        inner = env.description
        before = description or inner
        if inner.group_map != before.group_map:
            raise ValueError(
                "A wrapper keeps the groups and agents of the environment, which are "
                f"{inner.group_map}, but its description has {before.group_map}."
            )
        after = before
        moved: dict[Key, Key] = {}
        for name, added in (observe or {}).items():
            after = _observing(after, name, added)
            if not isinstance(before.groups[name].observation, spaces.Dict):
                seen = (name, "observation")
                moved |= {
                    key: (*seen, "observation", *key[2:])
                    for key, _ in leaf_spaces(before.groups[name].observation, seen)
                }
        self._description = replace(after, name=f"{type(self).__name__}({inner.name})")
        self._shared = _shared(inner, self._description, moved, set(writes))
        fields = inner.row()
        alone = {key: fields[key] for key in fields if key not in self._shared}
        self._private = allocate(alone, self.batch_size)
        common = set(self._shared.values())
        # Keys whose rows are zeros for agents that are done.
        self._cleared = {
            name: [
                (name, "reward"),
                *(
                    key
                    for key in self._description.observed()
                    if key[:2] == (name, "observation") and key not in common
                ),
            ]
            for name in self._description.groups
        }

    def after_reset(self, begun: Any, seed: Any) -> None:
        """Complete the first frame of an episode; does nothing by default.

        Args:
            begun: index of the rows to write, as in ``self.row[key][begun] = 0``:
                ``...`` for a single environment, and the worlds that begin, int64
                ``[k]``, for a ``BatchedEnv``.
            seed: of the episode: an int, and for a ``BatchedEnv`` the seeds of the
                worlds that begin, int64 ``[k]``.
        """

    def before_step(self) -> None:
        """Prepare the actions of the wrapped environment; does nothing by default.

        If the wrapper changes actions, it reads them from ``self.row`` and writes them
        to ``self.env_row``.
        """

    def after_step(self) -> None:
        """Complete observations and rewards after a step; does nothing by default."""

    @property
    @override
    def description(self) -> EnvDescription:
        return self._description

    @property
    @override
    def batch_size(self) -> tuple[int, ...]:
        """``()`` for a single environment, ``(K,)`` for K worlds."""
        return self.env.batch_size

    @override
    def engine(self) -> EnvBatch:
        return SimulatorBatch(self) if self.batch_size else SerialBatch([self])

    def bind(self, row: Row) -> None:
        """Share ``row`` with the wrapped environment, except for changed keys.

        Args:
            row: arrays ``[...]`` of a single environment, or ``[K, ...]`` of worlds.
        """
        shared = {key: row[ours] for key, ours in self._shared.items()}
        self.row, self.env_row = row, self._private | shared
        if isinstance(self.env, BatchedEnv) or self.batch_size:
            self._simulator = self.env.engine()
            self._simulator.bind(self.env_row)
            self._step_env: Callable[[], None] = self._simulator.step
        else:
            self.env.bind(self.env_row)
            self._step_env = self.env.step_row
        self._done = [
            _clearing(row[name, "done"], [row[key] for key in keys])
            for name, keys in self._cleared.items()
        ]

    def reset_row(self, seed: int) -> None:
        """Begin the episode of ``seed`` in a single environment."""
        assert not isinstance(self.env, BatchedEnv)
        self.env.reset_row(seed)
        self.after_reset(..., seed)

    def reset_worlds(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of the worlds ``indices``."""
        self._simulator.reset(indices, seeds)
        self.after_reset(np.asarray(indices), np.asarray(seeds))

    def step_row(self) -> None:
        """Step with the row's actions, in all worlds."""
        before = [read() for read, _, _ in self._done]
        self.before_step()
        self._step_env()
        self.after_step()
        for (_, nobody, clear), agents in zip(self._done, before, strict=True):
            if agents != nobody:
                clear(agents)

    def render(self, *world: int) -> NDArray[np.uint8] | None:
        """Return the image of the wrapped environment, or of one of its worlds."""
        return self.env.render(*world)

    @override
    def close(self) -> None:
        """Close the wrapped environment."""
        self._closed = True
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped environment."""
        env = self.__dict__.get("env")
        if env is None or name.startswith("_") or hasattr(type(self), name):
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(env, name)


def _clearing(
    done: NDArray[Any], arrays: Iterable[NDArray[Any]]
) -> tuple[Callable[[], bytes], bytes, Callable[[bytes], None]]:
    """Return how to clear the rows of agents that were done before, and still are.

    Args:
        done: flags of a group.
        arrays: of the group, whose rows are cleared.

    Returns:
        A function that reads the flags; what it returns if no agent is done; and a
        function that clears, given what was read before a step.
    """
    arrays = list(arrays)

    def clear(before: bytes) -> None:
        was = np.frombuffer(before, done.dtype).reshape(done.shape)
        rows = np.logical_and(was, done)[..., 0].nonzero()
        for array in arrays:
            array[rows] = 0

    return bytes_of(done).tobytes, bytes(done.nbytes), clear


def _require_env(env: Any, wrapper: str) -> MultiAgentEnv | BatchedEnv | EnvWrapper:
    if isinstance(env, (MultiAgentEnv, BatchedEnv, EnvWrapper)):
        return env
    written = factory_for(env)
    hint = f" Pass `{written.removeprefix('lambda: ')}`." if written else ""
    if callable(env):
        hint = (
            f" A factory builds the environment first: `lambda: {wrapper}(factory())`."
        )
    raise TypeError(
        f"{wrapper} wraps an environment of marl_collect, but got {env!r} of type "
        f"{type(env).__name__}.{hint}"
    )


def _observing(
    description: EnvDescription, name: str, added: Mapping[str, Space]
) -> EnvDescription:
    """Return the description with more observations of group ``name``."""
    group = description.groups.get(name)
    if group is None:
        raise ValueError(
            f"observe names the group {name!r}, but {description.name} has the groups "
            f"{list(description.groups)}."
        )
    seen: Space = group.observation
    before = (
        dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"observation": seen}
    )
    if again := sorted(before.keys() & added.keys()):
        raise ValueError(
            f"observe adds {again} to group {name!r}, which observes {sorted(before)} "
            "already: choose other names."
        )
    more: GroupDescription = replace(
        group, observation=spaces.Dict(before | dict(added))
    )
    return replace(description, groups={**description.groups, name: more})


def _shared(
    inner: EnvDescription,
    outer: EnvDescription,
    moved: Mapping[Key, Key],
    writes: set[Key],
) -> dict[Key, Key]:
    """Map keys of the wrapped environment to the keys whose arrays they share."""
    theirs, ours = inner.row(), outer.row()
    if unknown := sorted(writes - ours.keys()):
        raise ValueError(
            f"writes has the keys {unknown}, which are not in the row: found "
            f"{sorted(ours)}."
        )
    left, right = _spaces(inner), _spaces(outer)
    pairs = {key: moved.get(key, key) for key in theirs}
    return {
        key: target
        for key, target in pairs.items()
        if target not in writes
        and theirs[key] == ours.get(target)
        and left.get(key) == right.get(target)
    }


def _spaces(description: EnvDescription) -> dict[Key, Space]:
    by_key: dict[Key, Space] = {}
    for name, group in description.groups.items():
        by_key |= dict(leaf_spaces(group.observation, (name, "observation")))
        by_key |= dict(leaf_spaces(group.action, (name, "action")))
    for name, space in description.root.items():
        by_key |= dict(leaf_spaces(space, (name,)))
    return by_key
