"""Checks of a row that apply to every environment: flags, masks and values."""

from collections.abc import Iterator, Mapping
from typing import Any, cast, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import (
    FLAGS,
    EnvDescription,
    GroupDescription,
    Key,
    Row,
    leaf_spaces,
)

Array = NDArray[Any]
Boxes = Mapping[Key, spaces.Space[Any]]


def name_of(key: Key) -> str:
    """Return ``key`` as text for messages."""
    return "/".join(key)


@final
class Rules:
    """Checks an environment's row after each call and yields violations."""

    def __init__(self, description: EnvDescription, row: Row) -> None:
        """Check ``row``, which the environment writes."""
        self._description = description
        self._row = row
        self._before: dict[str, tuple[Array, Array, Array]] = {}
        self._spaces: dict[str, Boxes] = {
            name: dict(leaf_spaces(group.observation, (name, "observation")))
            for name, group in description.groups.items()
        }
        self._root = {
            key: space
            for name, whole in description.root.items()
            for key, space in leaf_spaces(whole, (name,))
        }

    def after_reset(self) -> Iterator[str]:
        """Check the row after a reset."""
        for key in self._flag_keys():
            if self._row[key].any():
                yield f"{name_of(key)} must be False after a reset, but is True."
        self._before = self._flags()
        yield from self._after_both()

    def after_step(self) -> Iterator[str]:
        """Check the row after a step, and its changes in the step."""
        for name in self._description.groups:
            yield from self._agent_flags(name)
            yield from self._rewards(name)
        yield from self._root_flags()
        yield from self._after_both()
        self._before = self._flags()

    def _after_both(self) -> Iterator[str]:
        done = bool(self._row["done",][0])
        acting = 0
        for name, group in self._description.groups.items():
            alive = ~self._row[name, "done"][:, 0].astype(np.bool_)
            acts = alive
            if group.mask:
                acts = self._row[name, "mask"].astype(np.bool_)
                for agent in np.flatnonzero(acts & ~alive):
                    yield (
                        f"{name}/mask is True for {group.agents[agent]}, which is done."
                    )
            acting += int(acts.sum())
            if group.action_mask:
                yield from self._action_mask(name, group, acts & (not done))
            yield from self._values(name, group, acts & alive)
        for key, space in self._root.items():
            yield from _wrong(name_of(key), self._row[key], space)
        if not acting and not done:
            yield (
                "No agent acts, but the root's done is False: expected an agent that "
                "acts, or the end of the episode."
            )

    def _agent_flags(self, name: str) -> Iterator[str]:
        agents = self._description.groups[name].agents
        now = dict(zip(FLAGS, self._flags()[name], strict=True))
        back = self._back(name)
        done_before = self._before[name][0] & ~back
        wrong = now["done"] != (now["terminated"] | now["truncated"])
        for agent in np.flatnonzero(wrong):
            yield (
                f"{name}: done of {agents[agent]} must be terminated or truncated, "
                f"but is {now['done'][agent]}, with terminated "
                f"{now['terminated'][agent]} and truncated {now['truncated'][agent]}."
            )
        for flag, before in zip(FLAGS, self._before[name], strict=True):
            for agent in np.flatnonzero(done_before & (now[flag] != before)):
                yield (
                    f"{name}/{flag} of {agents[agent]} changed after its end: flags "
                    "must keep the values of the step that ended it, or all become "
                    "False if the agent comes back."
                )

    def _rewards(self, name: str) -> Iterator[str]:
        agents = self._description.groups[name].agents
        rewards = self._row[name, "reward"][:, 0]
        for agent in np.flatnonzero(~np.isfinite(rewards)):
            yield f"{name}/reward of {agents[agent]} is {rewards[agent]}."
        dead = self._before[name][0] & ~self._back(name)
        for agent in np.flatnonzero(dead & (rewards != 0)):
            yield (
                f"{name}/reward of {agents[agent]} is {rewards[agent]} after its end: "
                "rows of dead agents must be zeros."
            )
        for key in self._spaces[name]:
            array = self._row[key]
            for agent in np.flatnonzero(dead):
                if array[agent].any():
                    yield (
                        f"{name_of(key)} of {agents[agent]} is not zero after its end: "
                        "rows of dead agents must be zeros."
                    )

    def _back(self, name: str) -> Array:
        """Return which agents were done before the step and no longer are."""
        before, now = self._before[name][0], self._flags()[name]
        back: Array = before & ~(now[0] | now[1] | now[2])
        return back

    def _root_flags(self) -> Iterator[str]:
        done, terminated, truncated = (bool(self._row[flag,][0]) for flag in FLAGS)
        groups = self._flags()
        if done != (terminated or truncated):
            yield (
                f"The root's done must be terminated or truncated, but is {done}, with "
                f"terminated {terminated} and truncated {truncated}."
            )
        every, terminations = (
            np.concatenate([flags[index] for flags in groups.values()])
            for index in (0, 1)
        )
        which = np.any if self._description.done_on_any else np.all
        if terminated != which(terminations):
            yield (
                f"The root's terminated must be {which.__name__} of the agents' "
                f"terminated, but is {terminated}."
            )
        if done and not every.all():
            yield "The root is done, so every agent must be done, but some are not."
        if not done and (every.any() if self._description.done_on_any else every.all()):
            how = "any agent" if self._description.done_on_any else "all agents"
            yield f"The root must be done, because {how} is done (done_on_any)."

    def _action_mask(
        self, name: str, group: GroupDescription, acts: Array
    ) -> Iterator[str]:
        legal = self._row[name, "action_mask"]
        for agent in range(group.n_agents):
            if acts[agent] and not legal[agent].any():
                yield f"{name}/action_mask leaves {group.agents[agent]} no action."
            elif not acts[agent] and not legal[agent].all():
                yield (
                    f"{name}/action_mask of {group.agents[agent]}, which does not act, "
                    "must be all True."
                )

    def _values(self, name: str, group: GroupDescription, acts: Array) -> Iterator[str]:
        for key, space in self._spaces[name].items():
            for agent, value in enumerate(self._row[key]):
                where = f"{name_of(key)} of {group.agents[agent]}"
                yield from _wrong(where, value, space, bounded=acts[agent])

    def _flags(self) -> dict[str, tuple[Array, Array, Array]]:
        return {
            name: cast(
                "tuple[Array, Array, Array]",
                tuple(self._row[name, flag][:, 0].astype(np.bool_) for flag in FLAGS),
            )
            for name in self._description.groups
        }

    def _flag_keys(self) -> list[Key]:
        keys: list[Key] = [(flag,) for flag in FLAGS]
        for name in self._description.groups:
            keys += [(name, flag) for flag in FLAGS]
        return keys


def _wrong(
    where: str, value: Array, space: spaces.Space[Any], *, bounded: bool = True
) -> Iterator[str]:
    """Yield that a value is NaN, which no value may be, or out of bounds."""
    low, high = _bounds(space)
    nan = np.isnan(value).any()
    if nan or (bounded and not ((value >= low) & (value <= high)).all()):
        what = "NaN" if nan else "out of bounds"
        yield (
            f"{where} is {what}: its space is {space}, but its values range from "
            f"{np.min(value)} to {np.max(value)}."
        )


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1
