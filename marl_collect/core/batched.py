"""``BatchedEnv``: a simulator that steps many worlds in one call.

A subclass has two methods on arrays whose first dimension is the world. ``begin``
begins episodes in some worlds, and ``advance`` steps all of them. ``WorldBatch`` adapts
it to the engine, and applies the rules that hold for every environment: time limits,
flags and rows of agents that are done, masks, and rewards.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.action_check import refusal, suspicion
from marl_collect.core.batch import SimulatorBatch
from marl_collect.core.description import (
    FLAGS,
    EnvDescription,
    GroupDescription,
    Key,
    Row,
    leaf_spaces,
)
from marl_collect.core.env import TensorDictEnv
from marl_collect.core.flags import Flags
from marl_collect.options import Option, require

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
Observations = Mapping[Any, Any]
"""By names and keys; see ``BatchedEnv``. A union would refuse ``dict[str, ...]``."""
Flagged = Array | Mapping[str, Array]
_Check = tuple[Callable[[], Any], Callable[[], None]]
"""``suspicion`` and ``refusal`` of an array of actions."""


@final
@dataclass(frozen=True)
class Step:
    """The result of ``BatchedEnv.advance``. K is the number of worlds.

    The engine copies the arrays at once, so a simulator may use them again; those of
    ``first`` after the next call of ``begin`` or ``advance``.

    Attributes:
        observations: after the step, and before any world begins anew; see
            ``BatchedEnv``.
        rewards: by group, ``[K, n]`` for n agents, or ``[K]`` if all of them get the
            same.
        terminated: which worlds or agents reached a terminal state: bool ``[K]``, or
            ``[K, n]`` by group.
        truncated: which worlds or agents were cut, as ``terminated``; None for none.
            The engine applies the description's ``time_limit``.
        first: only from a simulator that resets itself: the first observations of the
            new episodes in the worlds that ended in this step. Other rows are ignored.
    """

    observations: Observations
    rewards: Mapping[str, Array]
    terminated: Flagged
    truncated: Flagged | None = None
    first: Observations | None = None


class BatchedEnv(TensorDictEnv):
    """Base class of simulators that step K worlds in one call.

    Collectors, ``evaluate``, ``record`` and ``check_env`` take a factory of it like a
    factory of a single environment; each world is an environment of the batch.

    Observations are mappings. A group's name has the observations of its agents,
    ``[K, n, *shape]``; those of Dict and Tuple spaces are nested mappings and sequences
    of arrays. The name of a space of ``description.root`` has an array ``[K, *shape]``.
    Further arrays have the keys of the batch: ``(group, "action_mask")``,
    ``[K, n, A]``, and ``(group, "info", name)``, if the description has them, and
    ``(group, "mask")``, ``[K, n]``, if living agents may have to wait. All of them may
    be numpy arrays, tensors on the CPU, or other arrays that numpy converts.

    A simulator with a ``device`` gets tensors of this device instead of arrays, and
    returns such tensors. A ``Collector`` then keeps its memory and its batches on the
    device, and never waits for a result within a batch. So it calls ``begin`` after
    every step, also if no world begins, which only the device knows; such a call may
    return None. Everything else that steps environments copies the tensors to the host
    in every frame.

    The engine

    - counts frames, and truncates worlds at ``description.time_limit``;
    - keeps the flags of agents that are done, and replaces their observations and
      rewards in later frames by zeros;
    - ends a world with its last agent, or with ``done_on_any`` with the first, and sets
      the flags of the others;
    - writes ``(group, "mask")``, and allows every action to agents that do not act;
    - copies the last observations of an episode before the next one begins.
    """

    def __init__(
        self,
        description: EnvDescription,
        worlds: int,
        device: "torch.device | str | None" = None,
    ) -> None:
        """Set what the engine needs to know.

        Args:
            description: of one world. If seeds and actions do not determine an
                episode, it has ``repeats=False``.
            worlds: K, the number of worlds.
            device: of the tensors that ``begin`` and ``advance`` take and return, such
                as ``"cpu"`` or ``"cuda:0"``; None for arrays.

        Raises:
            ValueError: if there is no world, the time limit is no frame, or the device
                cannot be used here.
            TypeError: if one of the numbers is no integer.
        """
        worlds = require("worlds", worlds, int, Option("", at_least=1))
        limit = description.time_limit
        require("time_limit", limit, int | None, Option("", at_least=1))
        self._description = description
        self._worlds = worlds
        self._simulator_device: torch.device | None = None
        if device is not None:
            from marl_collect.core.device_check import usable_device

            self._simulator_device = usable_device("device", device)
        self.with_new_task: set[int] = set()

    @abc.abstractmethod
    def begin(self, which: Any, seeds: Any) -> Observations | None:
        """Begin episodes, and return observations.

        Args:
            which: the worlds that begin, bool ``[K]``; None for all. The state of
                other worlds must not change.
            seeds: a seed for each world, int64 ``[K]``: in ``[0, 2**31)``, or as given
                to ``evaluate``. Those of worlds that do not begin are the seeds of
                their running episodes.

        Returns:
            Observations of all worlds. Only the rows of ``which`` are used. With a
            ``device``, None if no world begins.
        """

    @abc.abstractmethod
    def advance(self, actions: Mapping[str, Any]) -> Step:
        """Step all worlds.

        Args:
            actions: by group, ``[K, n]`` int64 for Discrete spaces and
                ``[K, n, *shape]`` otherwise, clipped to the bounds of Box spaces; a
                nested dict for Dict and Tuple spaces. The arrays belong to the engine:
                read them, but neither change nor keep them. Rows of agents that do not
                act have arbitrary values.
        """

    def set_task(self, world: int, task: Any) -> None:
        """Prepare ``task``, from a curriculum, for a world's episodes from now on.

        It is called before ``begin``. An episode must depend only on its task, its seed
        and its actions.

        Raises:
            TypeError: the simulator takes no tasks, or not this one.
        """
        raise TypeError(
            f"{self.description.name} takes no tasks: implement set_task(world, task) "
            f"in {type(self).__name__}, or omit curriculum. The task of world {world} "
            f"is {task!r:.100}."
        )

    @final
    def require_begin(self, world: int) -> None:
        """Have a world's next episode begun by ``begin``.

        If the simulator has reset the world itself, it did not know the task.
        """
        self.with_new_task.add(world)

    def render(self, world: int) -> NDArray[np.uint8] | None:  # noqa: ARG002
        """Return an image ``[height, width, 3]`` of a world, or None."""
        return None

    @override
    def close(self) -> None:
        """Release all resources; may be called twice. Overrides call this method."""
        self._closed = True

    @final
    @property
    def worlds(self) -> int:
        """K, the number of worlds."""
        return self._worlds

    @final
    @property
    def simulator_device(self) -> "torch.device | None":
        """Device of the tensors of ``begin`` and ``advance``; None for arrays."""
        return self._simulator_device

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and guarantees of each world."""
        return self._description

    @final
    @property
    def batch_size(self) -> tuple[int, ...]:
        """``(K,)``."""
        return (self._worlds,)

    @final
    def engine(self) -> "WorldBatch":
        """Return the batch that the engine steps."""
        return WorldBatch(self)


def with_arrays(env: BatchedEnv) -> Any:
    """Return ``begin`` and ``advance`` of a simulator for arrays of the host."""
    if env.simulator_device is None:
        return env
    from marl_collect.core.host_copies import OnHost

    return OnHost(env)


@final
class WorldBatch(SimulatorBatch):
    """Steps a ``BatchedEnv`` on the engine's memory, and applies the common rules.

    Attributes:
        env: the simulator.
    """

    env: BatchedEnv

    def __init__(self, env: BatchedEnv) -> None:
        """Take ownership of ``env``."""
        super().__init__(env)
        self._simulator = with_arrays(env)
        self._groups = env.description.groups
        self._limit = env.description.time_limit
        self._seeds = np.zeros(env.worlds, np.int64)
        self._frames = np.zeros(env.worlds, np.int64)
        # Worlds that the simulator has reset itself, and their observations.
        self._renewed = np.zeros(env.worlds, np.bool_)
        self._first: Observations = {}

    def sums(self) -> dict[str, Array]:
        """Return the rewards of the running episodes so far, float64 ``[K, n]``.

        By group, if the group has ``episode_reward``.
        """
        return {
            rows.name: rows.sums
            for rows in self._rows
            if self._groups[rows.name].episode_reward
        }

    @override
    def bind(self, memory: Row) -> None:
        observed = self.description.observed()
        computed = {key for key in observed if key[-1] in FLAGS or key[1:] == ("mask",)}
        self._observed = [
            (memory[k], self._reader(k, memory[k]))
            for k in observed
            if k not in computed
        ]
        self._flags = Flags(memory, self.description)
        self._done: Array = memory["done",][:, 0]
        self._rows = [_GroupRows(n, g, memory) for n, g in self._groups.items()]
        self._actions: dict[str, Callable[[], Any]] = {}
        self._checks: list[_Check] = []
        for name, group in self._groups.items():
            readers = {}
            for path, read, check in _leaf_actions(name, group, memory):
                readers[path] = read
                self._checks.append(check)
            self._actions[name] = readers.get((), partial(nested, readers))

    @override
    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        rows = np.asarray(indices, np.int64)
        self._seeds[rows] = seeds
        self._frames[rows] = 0
        everything = len(rows) == self.size
        due = np.zeros(self.size, np.bool_)
        due[rows] = True
        renewed = due & self._renewed
        renewed[list(self.env.with_new_task)] = False
        self.env.with_new_task.difference_update(indices)
        self._renewed[rows] = False
        if renewed.any():
            self._begin(self._first, renewed)
            due &= ~renewed
            everything = False
        if everything:
            self._begin(self._simulator.begin(None, self._seeds.copy()), None)
        elif due.any():
            self._begin(self._simulator.begin(due.copy(), self._seeds.copy()), due)

    def _begin(self, observations: Observations, which: Array | None) -> None:
        """Write the first frame of the worlds of ``which``; None for all."""
        rows = slice(None) if which is None else np.flatnonzero(which)
        for target, read in self._observed:
            target[rows] = read(observations)[rows]
        self._flags.clear(rows)
        for group in self._rows:
            group.begin(observations, rows)

    @property
    @override
    def step_async(self) -> Callable[[], None]:
        return self._step

    def _step(self) -> None:
        if self.checks_actions:
            self._check_actions()
        actions = {name: read() for name, read in self._actions.items()}
        step = self._simulator.advance(actions)
        if not isinstance(step, Step):
            raise TypeError(
                f"advance() of {self.description.name} must return a Step, but "
                f"returned {step!r:.200} of type {type(step).__name__}."
            )
        observations = step.observations
        for target, read in self._observed:
            target[...] = read(observations)
        some = self._flags.some
        for group in self._rows:
            group.step(step, some=some)
        terminated = self._flagged(step.terminated, "terminated")
        truncated = None
        if step.truncated is not None:
            truncated = self._flagged(step.truncated, "truncated")
        self._flags.end_worlds(terminated, truncated)
        if step.first is not None:
            self._renew(step.first)
        if self._limit is not None:
            self._frames += 1
            late = self._frames >= self._limit
            if late.any():
                late &= ~self._done
                self._flags.truncate(np.flatnonzero(late))

    def _check_actions(self) -> None:
        for is_suspicious, refuse in self._checks:
            if is_suspicious():
                refuse()

    def _renew(self, first: Observations) -> None:
        if self.description.repeats:
            raise ValueError(
                f"advance() of {self.description.name} returned first=, the "
                "observations of episodes that the simulator began itself, without "
                "their seeds. Declare EnvDescription(..., repeats=False)."
            )
        np.copyto(self._renewed, self._done)
        self._first = first

    def _reader(self, key: Key, target: Array) -> Callable[[Observations], Array]:
        """Return a function that returns what belongs into an array of the memory."""
        if key[0] not in self._groups:
            return partial(self._value, key, key[0], key[1:], target)
        if key[1] == "observation":
            return partial(self._value, key, key[0], key[2:], target)
        return partial(self._value, key, key, (), target)

    def _value(
        self,
        key: Key,
        name: str | Key,
        inner: Key,
        target: Array,
        observations: Observations,
    ) -> Array:
        """Return an array of the simulator, after checking shape and dtype.

        Args:
            key: of the array in the memory.
            name: its key in the observations.
            inner: names within nested observations.
            target: the array in the memory.
            observations: of the simulator.
        """
        value: Any = observations.get(name)
        if value is None:
            raise KeyError(
                f"{self.description.name} returned no observations of {name!r}: found "
                f"{list(observations)}. Expected {list(target.shape)}."
            )
        value = inner_value(value, inner)
        if type(value) is not np.ndarray or value.shape != target.shape:
            value = _array(value, target.shape, self.description.name, "/".join(key))
        if value.dtype != target.dtype and not np.can_cast(value.dtype, target.dtype):
            self._check_cast(key, value, target.dtype)
        return value

    def _check_cast(self, key: Key, value: Array, dtype: np.dtype[Any]) -> None:
        """Raise if values are of another kind, or integers that ``dtype`` lacks."""
        where = (
            f"{self.description.name} returned {'/'.join(key)} of dtype {value.dtype}"
        )
        if not np.can_cast(value.dtype, dtype, "same_kind"):
            raise TypeError(
                f"{where}, but its space has {dtype}: expected a dtype of this kind."
            )
        if dtype.kind in "iu":
            lost = value[value.astype(dtype) != value]
            if lost.size:
                raise TypeError(
                    f"{where}, but its space has {dtype}, which cannot hold the value "
                    f"{lost[0]}."
                )

    def _flagged(self, flags: Flagged, what: str) -> list[Array] | None:
        """Return the flags of each group, ``[K, n, 1]``; None if there are none."""
        name = self.description.name
        if not isinstance(flags, Mapping):
            world = _array(flags, (self.size,), name, what)
            if not world.any():
                return None
            world = world.astype(np.bool_)
            # Faster than a broadcast over few agents.
            repeated = (world.repeat(g.n_agents) for g in self._groups.values())
            return [flags.reshape(self.size, -1, 1) for flags in repeated]
        arrays = [
            _array(
                _entry(flags, group, name, what), (self.size, g.n_agents), name, what
            )
            for group, g in self._groups.items()
        ]
        if not any(array.any() for array in arrays):
            return None
        return [array.astype(np.bool_)[..., None] for array in arrays]


@final
class _GroupRows:
    """Writes rewards and masks of one group, and clears rows of agents that are done.

    ``step`` is called before the flags of its step are set.

    Attributes:
        name: of the group.
        sums: rewards of the running episodes, float64 ``[K, n]``, if their sums are
            observed.
    """

    def __init__(self, name: str, group: GroupDescription, memory: Row) -> None:
        self.name = name
        self._done: Array = memory[name, "done"][..., 0]
        self._reward: Array = memory[name, "reward"][..., 0]
        self._total: Array | None = None
        if group.episode_reward:
            self._total = memory[name, "episode_reward"][..., 0]
            self.sums = np.zeros(self._total.shape)
        self._mask: Array | None = memory[name, "mask"] if group.mask else None
        self._legal: Array | None = None
        if group.action_mask:
            self._legal = memory[name, "action_mask"]
        self._cleared: list[Array] = [
            array
            for key, array in memory.items()
            if key[0] == name and key[1:2] in (("observation",), ("info",))
        ]

    def begin(self, observations: Observations, rows: Any) -> None:
        """Set the masks of worlds that begin."""
        if self._total is not None:
            self.sums[rows] = 0
        if self._mask is not None:
            self._mask[rows] = True
        self._wait(observations, rows)

    def step(self, step: Step, *, some: bool) -> None:
        """Write the rewards of a step, and clear the rows of agents that were done.

        Args:
            step: the step.
            some: False if no agent was done before.
        """
        name = self.name
        reward = step.rewards.get(name)
        if reward is None:
            raise KeyError(
                f"advance() returned no rewards of group {name!r}: found "
                f"{list(step.rewards)}."
            )
        if type(reward) is not np.ndarray:
            reward = np.asarray(reward)
        if reward.shape == self._done.shape[:1]:
            reward = reward[:, None]
        elif reward.shape != self._done.shape:
            raise ValueError(
                f"advance() returned rewards of {name!r} of shape "
                f"{list(reward.shape)}: expected {list(self._done.shape)}, or "
                f"{list(self._done.shape[:1])} for all of its agents."
            )
        self._reward[...] = reward
        if some and self._done.any():
            worlds, agents = np.nonzero(self._done)
            self._reward[worlds, agents] = 0
            for array in self._cleared:
                array[worlds, agents] = 0
        if self._total is not None:
            self.sums += self._reward
            self._total[...] = self.sums
        self._wait(step.observations, slice(None))

    def _wait(self, observations: Observations, rows: Any) -> None:
        """Set who acts, if the simulator says it.

        ``Flags`` clears the masks of agents that are done.
        """
        mask = observations.get((self.name, "mask"))
        if mask is None:
            return
        if self._mask is None:
            raise ValueError(
                f"({self.name!r}, 'mask') is in the observations, but the group has "
                "mask=False in its description."
            )
        acts = _array(mask, self._mask.shape, "The simulator", f"{self.name}/mask")
        self._mask[rows] = acts[rows]
        if self._legal is not None:
            waiting = ~self._mask.astype(np.bool_)
            self._legal[waiting] = True


def _array(value: Any, shape: tuple[int, ...], who: str, what: str) -> Array:
    array: Array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(
            f"{who} returned {what} of shape {list(array.shape)}: expected "
            f"{list(shape)}."
        )
    return array


def _entry(mapping: Any, group: str, who: str, what: str) -> Any:
    if not isinstance(mapping, Mapping) or group not in mapping:
        groups = list(mapping) if isinstance(mapping, Mapping) else mapping
        raise KeyError(f"{who} returned no {what} of group {group!r}: got {groups!r}.")
    return mapping[group]


def nested(readers: Mapping[Key, Callable[[], Array]]) -> dict[str, Any]:
    """Return the actions of a group with a Dict or Tuple space."""
    tree: dict[str, Any] = {}
    for path, read in readers.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = read()
    return tree


def _leaf_actions(
    name: str, group: GroupDescription, memory: Row
) -> Iterator[tuple[Key, Callable[[], Array], _Check]]:
    """Yield for each array of a group's actions its path, a reader and a check."""
    acts = memory.get((name, "mask"))
    one_hot = group.one_hot

    def acting() -> Any:
        return True if acts is None else acts.astype(np.bool_)

    for key, space in leaf_spaces(group.action, (name, "action")):
        array: Array = memory[key]
        read: Callable[[], Any] = partial(np.asarray, array)
        if one_hot:
            read = partial(array.argmax, -1)
        elif isinstance(space, spaces.Box) and (
            space.bounded_below.any() or space.bounded_above.any()
        ):
            clipped = np.empty_like(array)
            read = partial(np.clip, array, space.low, space.high, clipped)
        is_suspicious = suspicion(array, space, one_hot=one_hot)
        refuse = refusal(key, space, array, group.agents, acting, one_hot=one_hot)
        yield key[2:], read, (is_suspicious, refuse)


def inner_value(value: Any, path: Sequence[str]) -> Any:
    """Return what is at ``path`` in nested mappings and sequences."""
    for part in path:
        value = value[int(part) if isinstance(value, Sequence) else part]
    return value
