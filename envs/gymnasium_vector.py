"""``GymnasiumVectorEnv``: the worlds of a simulator with Gymnasium's vector API."""

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription, GroupDescription, from_zero
from marl_collect.envs.common import closed_on_error, reset_options

_GROUP = "agent"
_SEEDS = (
    "reset() was given a list of seeds, one for each world. If this environment takes "
    "none, build it with gymnasium.make_vec(..., vectorization_mode='sync'), or pass "
    "seeds=False."
)


@final
class GymnasiumVectorEnv(BatchedEnv):
    """Worlds of a vector environment, such as ``gymnasium.vector.SyncVectorEnv``.

    Each world has one agent, ``agent_0`` of the group ``agent``. All autoreset modes
    give the same data, those of separate environments: a world that ended is reset at
    once, with the seed of its next episode, by ``reset(options={"reset_mask": ...})``.
    Its last observation stays that of the episode. A simulator that would reset it in
    the next step has nothing left to reset, so every step is a frame of every world.

    With ``AutoresetMode.SAME_STEP``, Gymnasium resets a world before it copies the last
    observation. An environment that returns the same array again then loses it: use
    ``AutoresetMode.DISABLED``.

    Example:
        >>> make = partial(gymnasium.make_vec, "CartPole-v1", 64, "sync")
        >>> factory = lambda: GymnasiumVectorEnv(make())
    """

    def __init__(self, env: Any, *, seeds: bool = True) -> None:
        """Own ``env``; an error here closes it, because a worker has no other owner.

        Args:
            env: a ``gymnasium.vector.VectorEnv``, or an environment of EnvPool.
            seeds: False if ``reset`` cannot seed single worlds, as in EnvPool: the
                description then has ``repeats=False``, and with same-step resets the
                first observations of episodes are those of the simulator's own resets.

        Raises:
            ValueError: if ``env`` does not say when it resets, or resets again after
                ``reset``.
        """
        self._env = env
        self._seeded = seeds
        self._seen: Any = None
        self._tasks: dict[int, dict[str, Any]] = {}
        self._masks = False  # Whether a reset of some worlds kept the others.
        with closed_on_error(env):
            self._same_step = _mode_of(env) == "SameStep"
            spec = getattr(env, "spec", None)
            inner = getattr(env, "unwrapped", env)
            name = getattr(spec, "id", None) or type(inner).__name__
            group = GroupDescription(
                ("agent_0",),
                env.single_observation_space,
                from_zero(env.single_action_space),
            )
            description = EnvDescription(name, {_GROUP: group}, repeats=seeds)
            super().__init__(description, env.num_envs)

    @override
    def begin(
        self, which: NDArray[np.bool_] | None, seeds: NDArray[np.int64]
    ) -> dict[str, Any]:
        seed = seeds.tolist() if self._seeded else None
        for task, worlds in self._by_task(which):
            if worlds is None:
                options = {"options": task} if task else {}
                try:
                    self._seen, _ = self._env.reset(seed=seed, **options)
                except Exception as error:
                    if self._seeded:
                        error.add_note(_SEEDS)
                    raise
            else:
                self._reset_some(worlds, seed, task)
        return _of_group(self._seen)

    def _by_task(
        self, which: NDArray[np.bool_] | None
    ) -> list[tuple[dict[str, Any], NDArray[np.bool_] | None]]:
        """Return tasks, each with the worlds that begin it; None for all worlds.

        One reset has the same options for all worlds. So where all of them begin, they
        do so with the first task, and then some begin again.
        """
        if not self._tasks:
            return [({}, which)]
        begun: dict[bytes, tuple[dict[str, Any], Any]] = {}
        for world in range(self.worlds) if which is None else np.flatnonzero(which):
            task = self._tasks[int(world)]
            nobody = np.zeros(self.worlds, np.bool_)
            begun.setdefault(pickle.dumps(task), (task, nobody))[1][world] = True
        resets = list(begun.values())
        if which is None:
            resets[0] = resets[0][0], None
        return resets

    def _reset_some(
        self, which: NDArray[np.bool_], seed: Any, task: Mapping[str, Any]
    ) -> None:
        before, rows = self._seen, np.flatnonzero(which)
        if not self._masks:  # With ``copy=False`` the simulator writes into it.
            before = copy.deepcopy(before)
        options = {**task, "reset_mask": which.copy()}
        seen, _ = self._env.reset(seed=seed, options=options)
        self._seen = _with_rows(before, rows, seen)
        if not self._masks:
            self._masks = True
            _check_others(self.description.name, before, seen, np.flatnonzero(~which))

    @override
    def set_task(self, world: int, task: Any) -> None:
        """Pass a task to the resets of a world.

        Args:
            world: index of the world.
            task: a mapping for ``reset(seed, options=task)`` of its environment.

        Raises:
            TypeError: the task is no mapping, or ``reset`` takes no options.
        """
        self._tasks[world] = reset_options(self._env, task)

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        taken = _for_simulator(self._env.single_action_space, actions[_GROUP])
        seen, rewards, terminated, truncated, infos = self._env.step(taken)
        first = None
        if self._same_step:
            rows = np.flatnonzero(terminated | truncated)
            if len(rows):
                first = None if self._seeded else _of_group(seen)
                seen = _with_rows(seen, rows, infos["final_obs"])
        self._seen = seen
        return Step(_of_group(seen), {_GROUP: rewards}, terminated, truncated, first)

    @override
    def render(self, world: int) -> NDArray[np.uint8] | None:
        frames = self._env.render()
        return None if frames is None else frames[world]

    @override
    def close(self) -> None:
        super().close()
        self._env.close()


def _mode_of(env: Any) -> str:
    """Return when a vector environment resets worlds.

    Raises:
        ValueError: if it does not say so, or resets again after ``reset``.
    """
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise ValueError(
            f"{env} does not say when it resets worlds: set metadata['autoreset_mode'] "
            "to a gymnasium.vector.AutoresetMode, which needs gymnasium>=1.1."
        )
    mode = str(getattr(mode, "value", mode))
    inner = getattr(env, "unwrapped", env)
    shares = getattr(inner, "shared_memory", True)
    if mode == "NextStep" and isinstance(inner, AsyncVectorEnv) and not shares:
        raise ValueError(
            "AsyncVectorEnv(shared_memory=False) resets a world in the next step even "
            "if reset() was called before: use shared_memory=True, or "
            "autoreset_mode=AutoresetMode.DISABLED."
        )
    return mode


def _of_group(seen: Any) -> dict[str, Any]:
    return {_GROUP: _with_agents(seen)}


def _with_agents(seen: Any) -> Any:
    """Return the observations with a dimension of agents, ``[K, 1, ...]``."""
    if isinstance(seen, Mapping):
        return {name: _with_agents(value) for name, value in seen.items()}
    if isinstance(seen, tuple):
        return tuple(map(_with_agents, seen))
    return np.asarray(seen)[:, None]


def _for_simulator(space: spaces.Space[Any], actions: Any) -> Any:
    """Return the actions ``[K, 1, ...]`` of a group, as the simulator takes them."""
    if isinstance(space, spaces.Dict):
        return {n: _for_simulator(s, actions[n]) for n, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_for_simulator(s, actions[str(i)]) for i, s in parts)
    taken = actions[:, 0]
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return taken + space.start
    # The engine uses the memory again, and simulators of processes may still read it.
    return taken.copy()


def _with_rows(seen: Any, rows: NDArray[np.int64], new: Any) -> Any:
    """Return a copy of ``seen``, in which ``rows`` have new observations.

    Args:
        seen: observations of all worlds.
        rows: some of the worlds.
        new: observations of all worlds, of ``rows`` alone, or an object per world.
    """
    if isinstance(new, np.ndarray) and new.dtype == object:
        new = _stacked(new[rows].tolist())
    if isinstance(seen, Mapping):
        return {n: _with_rows(value, rows, new[n]) for n, value in seen.items()}
    if isinstance(seen, tuple):
        pairs = zip(seen, new, strict=True)
        return tuple(_with_rows(value, rows, other) for value, other in pairs)
    merged, new = np.array(seen), np.asarray(new)
    merged[rows] = new if len(new) == len(rows) else new[rows]
    return merged


def _stacked(values: Sequence[Any]) -> Any:
    """Return one tree of arrays ``[m, ...]`` of m trees."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _stacked([value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(_stacked, zip(*values, strict=True)))
    return np.stack(values)


def _check_others(
    name: str, before: Any, after: Any, others: NDArray[np.int64]
) -> None:
    """Check that a masked reset changed no world of ``others``.

    Raises:
        ValueError: if it did.
    """
    if isinstance(before, Mapping | tuple):
        keys = before if isinstance(before, Mapping) else range(len(before))
        for key in keys:
            _check_others(name, before[key], after[key], others)
    elif len(after) == len(before) and not np.array_equal(
        before[others], after[others], equal_nan=before.dtype.kind in "fc"
    ):
        raise ValueError(
            f"{name} ignores options={{'reset_mask': ...}} in reset(): it resets all "
            "worlds. Build it as SyncVectorEnv or AsyncVectorEnv, such as with "
            "gymnasium.make_vec(..., vectorization_mode='sync')."
        )
