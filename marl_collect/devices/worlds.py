"""Steps the worlds of a simulator on tensors, with the rules of ``WorldBatch``.

Nothing here depends on values: which worlds end is a mask that stays on the device.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces

from marl_collect.core.action_check import not_one_hot, value_counts
from marl_collect.core.batched import (
    BatchedEnv,
    Observations,
    Step,
    inner_value,
    nested,
)
from marl_collect.core.description import FLAGS, GroupDescription, Key, leaf_spaces
from marl_collect.devices.memory import BOOLS, REWARDS, DeviceMemory

_Read = Callable[[Observations], torch.Tensor]


@final
class DeviceWorlds:
    """Begins and steps all worlds on the memory of a device.

    Attributes:
        frames: length of each world's episode so far, int64 ``[K]``.
        over: which worlds ended in the last step, bool ``[K]``.
    """

    def __init__(
        self, env: BatchedEnv, memory: DeviceMemory, time_limit: int | None
    ) -> None:
        """Step ``env``.

        Args:
            env: the simulator.
            memory: observations and flags are written there, and actions read.
            time_limit: frames after which episodes are truncated.
        """
        self._env = env
        self._name = env.description.name
        self._limit = time_limit
        groups = env.description.groups
        tensors, agents = memory.tensors, memory.agents
        bools, count = memory.blocks[BOOLS], agents.number
        self._device = bools.device
        self._size = env.worlds
        self._flags = bools[:, : 3 * count], bools[:, 4 * count :]
        parts = [bools[:, k * count : (k + 1) * count] for k in range(4)]
        self._done, self._terminated, self._truncated, self._mask = parts
        self._root = bools[:, 4 * count :].unbind(1)
        self._any = env.description.done_on_any
        self._ranges = agents.ranges
        self._rewards = [
            (name, memory.blocks[REWARDS][:, first:last], self._done[:, first:last])
            for name, (first, last) in agents.ranges.items()
        ]
        self._totals = {
            name: (
                tensors[name, "reward"][..., 0].double(),
                tensors[name, "reward"][..., 0],
                tensors[name, "episode_reward"][..., 0],
            )
            for name, group in groups.items()
            if group.episode_reward
        }
        observed = env.description.observed()
        self._data: list[tuple[torch.Tensor, _Read, torch.Tensor | None]] = []
        for key in observed:
            if key[-1] in FLAGS or key[1:] == ("mask",):
                continue
            # Rows of agents that are done become zeros, but what they may do is set.
            cleared = key[1:2] in (("observation",), ("info",))
            dead = None
            if cleared and key[0] in groups:
                first, last = agents.ranges[key[0]]
                dead = self._done[:, first:last]
            self._data.append((tensors[key], self._reader(key, tensors[key]), dead))
        self._masks = [
            (name, self._mask[:, first:last], groups[name].mask)
            for name, (first, last) in agents.ranges.items()
        ]
        self._legal = [
            (name, tensors[name, "action_mask"], self._done[:, first:last])
            for name, (first, last) in agents.ranges.items()
            if groups[name].action_mask
        ]
        self._actions = [
            (name, _actions(name, group, tensors)) for name, group in groups.items()
        ]
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.frames = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        self.over = torch.zeros(self._size, dtype=torch.bool, device=self._device)

    def load_sums(self, sums: Mapping[str, Any]) -> None:
        """Set the rewards of the running episodes, float64 ``[K, n]`` by group."""
        for name, (total, *_) in self._totals.items():
            total.copy_(torch.from_numpy(sums[name]))

    def begin(self, seeds: torch.Tensor) -> bool:
        """Begin new episodes where ``over``.

        Args:
            seeds: of the episodes that begin or go on, int64 ``[K]``.

        Returns:
            False if the simulator says that no world begins.

        Raises:
            TypeError: if it returns something other than observations or None.
        """
        over = self.over
        first = self._env.begin(over, seeds)
        if first is None:
            return False
        if not isinstance(first, Mapping):
            raise TypeError(
                f"begin() of {self._name} must return observations, or None if no "
                f"world begins, but returned {first!r:.200}."
            )
        for target, read, _ in self._data:
            value = read(first)
            torch.where(_wide(over, value), value, target, out=target)
        for flags in self._flags:
            flags.masked_fill_(over[:, None], False)
        self._mask.logical_or_(over[:, None])
        for total, *_ in self._totals.values():
            total.masked_fill_(over[:, None], 0)
        self._wait(first, over[:, None])
        if self._limit is not None:
            self.frames.masked_fill_(over, 0)
        return True

    def step(self) -> None:
        """Step all worlds with the actions in the memory."""
        step = self._env.advance({name: act() for name, act in self._actions})
        if not isinstance(step, Step):
            raise TypeError(
                f"advance() of {self._name} must return a Step, but returned "
                f"{step!r:.200} of type {type(step).__name__}."
            )
        if step.first is not None:
            raise TypeError(
                f"advance() of {self._name} returned first=, which a simulator with a "
                "device must not: begin episodes in begin(which, seeds), where which "
                "is a mask."
            )
        for target, read, dead in self._data:
            value = read(step.observations)
            if dead is None:
                target.copy_(value)
            else:
                zero = self._zero(value.dtype)
                torch.where(_wide(dead, value), zero, value, out=target)
        self._reward(step)
        self._wait(step.observations, None)
        self._end(step)

    def _reward(self, step: Step) -> None:
        for name, target, dead in self._rewards:
            reward: Any = step.rewards.get(name)
            if reward is None:
                raise KeyError(
                    f"advance() returned no rewards of group {name!r}: found "
                    f"{list(step.rewards)}."
                )
            self._require(reward, "rewards of " + repr(name), dead.shape, alone=True)
            value = reward.to(torch.float32)
            value = value[:, None] if value.ndim == 1 else value
            torch.where(dead, self._zero(torch.float32), value, out=target)
        for total, reward, target in self._totals.values():
            target.copy_(total.add_(reward))

    def _wait(self, observations: Observations, where: torch.Tensor | None) -> None:
        """Set who acts, if the simulator says it; see ``_GroupRows``.

        Args:
            observations: of the simulator.
            where: worlds that begin, ``[K, 1]``; None after a step.
        """
        told: set[str] = set()
        for name, target, masked in self._masks:
            acts: Any = observations.get((name, "mask"))
            if acts is None:
                continue
            if not masked:
                raise ValueError(
                    f"({name!r}, 'mask') is in the observations, but the group has "
                    "mask=False in its description."
                )
            self._require(acts, f"{name}/mask", target.shape)
            acts = acts.to(torch.bool)
            if where is None:
                target.copy_(acts)
            else:
                torch.where(where, acts, target, out=target)
            told.add(name)
        for name, legal, _ in self._legal:
            if name in told:
                first, last = self._ranges[name]
                legal.logical_or_(~self._mask[:, first:last, None])

    def _end(self, step: Step) -> None:
        """Set the flags; see ``BatchFlags``."""
        alive = ~self._done
        terminated = self._flagged(step.terminated, "terminated")
        self._terminated.logical_or_(terminated.logical_and(alive))
        if step.truncated is not None:
            truncated = self._flagged(step.truncated, "truncated")
            self._truncated.logical_or_(truncated.logical_and(alive))
        torch.logical_or(self._terminated, self._truncated, out=self._done)
        join = torch.any if self._any else torch.all
        over = join(self._done, 1)
        ends = join(self._terminated, 1)
        cut = torch.any(self._truncated, 1) if self._any else over & ~ends
        if self._limit is not None:
            self.frames.add_(1)
            late = self.frames >= self._limit
            cut = cut | (late & ~over)
            over = over | late
        torch._foreach_copy_(self._root, [over, ends, cut])
        self.over = over
        over = over[:, None]
        self._truncated.logical_or_(over & ~self._done)
        self._done.logical_or_(over)
        self._mask.logical_and_(~self._done)
        for _, legal, dead in self._legal:
            legal.logical_or_(dead[..., None])

    def _flagged(self, flags: Any, what: str) -> torch.Tensor:
        """Return flags of all agents, ``[K, N]``, or of the worlds, ``[K, 1]``."""
        if not isinstance(flags, Mapping):
            self._require(flags, what, (self._size,))
            world: torch.Tensor = flags.to(torch.bool)
            return world[:, None]
        parts = []
        for name, (first, last) in self._ranges.items():
            if name not in flags:
                raise KeyError(
                    f"{self._name} returned no {what} of group {name!r}: got "
                    f"{list(flags)!r}."
                )
            self._require(flags[name], what, (self._size, last - first))
            parts.append(flags[name].to(torch.bool))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _reader(self, key: Key, target: torch.Tensor) -> _Read:
        """Return a function that returns what belongs into a tensor of the memory."""
        name: Any = key
        inner: Key = ()
        if key[0] not in self._ranges:
            name, inner = key[0], key[1:]
        elif key[1] == "observation":
            name, inner = key[0], key[2:]
        return partial(self._value, key, name, inner, target)

    def _value(
        self,
        key: Key,
        name: str | Key,
        inner: Key,
        target: torch.Tensor,
        observations: Observations,
    ) -> torch.Tensor:
        value: Any = observations.get(name)
        if value is None:
            raise KeyError(
                f"{self._name} returned no observations of {name!r}: found "
                f"{list(observations)}. Expected {list(target.shape)}."
            )
        value = inner_value(value, inner)
        self._require(value, "/".join(key), target.shape)
        if value.dtype != target.dtype:
            self._require_cast(key, value.dtype, target.dtype)
            value = value.to(target.dtype)
        tensor: torch.Tensor = value
        return tensor

    def _require(
        self, value: Any, what: str, shape: tuple[int, ...], *, alone: bool = False
    ) -> None:
        """Check what the simulator returned, except for its values.

        Args:
            value: what it returned.
            what: its name.
            shape: the expected shape.
            alone: whether ``[K]`` will do.
        """
        if not isinstance(value, torch.Tensor) or not same_device(
            value.device, self._device
        ):
            is_tensor = isinstance(value, torch.Tensor)
            found = value.device if is_tensor else type(value).__name__
            raise TypeError(
                f"{self._name} has device={self._device}, but returned {what} as "
                f"{found}: expected a tensor of this device."
            )
        if value.shape != shape and not (alone and value.shape == shape[:1]):
            raise ValueError(
                f"{self._name} returned {what} of shape {list(value.shape)}: expected "
                f"{list(shape)}."
            )

    def _require_cast(self, key: Key, there: torch.dtype, here: torch.dtype) -> None:
        """Raise if values can be lost, which only the device could tell."""
        whole = not (there.is_floating_point or torch.bool in (there, here))
        fits = torch.can_cast(there, here)
        if fits and whole and not here.is_floating_point:
            one, two = torch.iinfo(there), torch.iinfo(here)
            fits = two.min <= one.min and one.max <= two.max
        if not fits:
            raise TypeError(
                f"{self._name} returned {'/'.join(key)} of dtype {there}, but its "
                f"space has {here}: return a tensor of this dtype."
            )

    def _zero(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return self._zeros[dtype]


def same_device(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are the same; a GPU without a number is the first."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _wide(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask with as many dimensions as ``like``."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _actions(
    name: str, group: GroupDescription, tensors: Mapping[Key, torch.Tensor]
) -> Callable[[], Any]:
    """Return a function that returns a group's actions for the simulator."""
    readers: dict[Key, Callable[[], Any]] = {}
    for key, space in leaf_spaces(group.action, (name, "action")):
        tensor = tensors[key]
        if group.one_hot:
            readers[key[2:]] = partial(tensor.argmax, -1)
        elif isinstance(space, spaces.Box) and (
            space.bounded_below.any() or space.bounded_above.any()
        ):
            bounds = [
                torch.from_numpy(np.asarray(bound, dtype=space.dtype)).to(tensor)
                for bound in (space.low, space.high)
            ]
            readers[key[2:]] = partial(torch.clamp, tensor, *bounds)
        else:
            readers[key[2:]] = partial(_itself, tensor)
    return readers.get((), partial(nested, readers))


def impossible_actions(
    name: str, group: GroupDescription
) -> list[tuple[Key, Callable[[torch.Tensor], torch.Tensor]]]:
    """Return how to find actions that an environment must not get, by key.

    Each function returns bool ``[..., n]`` for actions ``[..., n, *shape]``.
    """
    found: list[tuple[Key, Callable[[torch.Tensor], torch.Tensor]]] = []
    for key, space in leaf_spaces(group.action, (name, "action")):
        if group.one_hot:
            rule: Callable[[torch.Tensor], torch.Tensor] = not_one_hot
        elif isinstance(space, spaces.Box):  # Infinity is clipped.
            rule = torch.isnan if space.dtype.kind == "f" else torch.zeros_like
        else:
            top = value_counts(space).astype(np.int64)
            rule = partial(_outside, torch.from_numpy(top))
        found.append((key, partial(_by_agent, rule, int(group.one_hot), space)))
    return found


def _by_agent(
    rule: Callable[[torch.Tensor], torch.Tensor],
    hot: int,
    space: spaces.Space[Any],
    actions: torch.Tensor,
) -> torch.Tensor:
    wrong = rule(actions)
    inner = 0 if hot else len(space.shape or ())
    for _ in range(inner):
        wrong = wrong.any(-1)
    return wrong.bool()


def _outside(top: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return (actions < 0) | (actions >= top.to(actions.device))
