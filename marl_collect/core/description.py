"""``EnvDescription``: the groups, spaces and keys of an environment.

An ``EnvDescription`` is plain data that can be pickled, so a worker can send it to the
trainer. It defines the keys, shapes and dtypes of everything that is stored for one
frame of one environment:

===========  ==================================================  ===============
kind         keys                                                stored at
===========  ==================================================  ===============
observed     observations, masks, infos, done flags, root extras  root and next
outcome      ``(g, "reward")``                                    next
action       ``(g, "action")``                                    root
===========  ==================================================  ===============

Keys are tuples of strings, at the root too: ``("done",)``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, final

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_collect.programs import notebooks

Key = tuple[str, ...]
Row = Mapping[Key, NDArray[np.generic]]
"""One environment's memory of one frame: an array for each key."""

FLAGS = ("done", "terminated", "truncated")
ALIGNMENT = 64
"""Alignment of large arrays in bytes: one cache line."""
SMALL = 4096
"""Largest size in bytes at which an array is copied together with others."""
_WORD = 16
_WIDEST = 8
"""Size in bytes of the widest dtype that torch has."""
_STORED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_INT64 = np.dtype(np.int64)
"""Dtype of all discrete actions, because losses index with them."""


@dataclass(frozen=True)
class Field:
    """Shape (without batch dimensions) and dtype of one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        """Size of one frame of this field in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Fields = Mapping[Key, Field]


@dataclass(frozen=True)
class GroupDescription:
    """The agents of one group, and the spaces of each agent.

    Attributes:
        agents: names, in the order of their rows.
        observation: one agent's observation space; Dict and Tuple spaces nest.
        action: one agent's action space, as the policy sees it: Discrete actions
            count from 0, regardless of ``start``.
        categorical_actions: False stores a Discrete action one-hot.
        action_mask: whether ``(g, "action_mask")``, the legal actions, is written.
        mask: whether ``(g, "mask")``, the agents that act in this frame, is written.
        info: shape of each numeric info of one agent, stored as float32.
        episode_reward: whether ``("next", g, "episode_reward")`` is written.
    """

    agents: tuple[str, ...]
    observation: spaces.Space[object]
    action: spaces.Space[object]
    categorical_actions: bool = True
    action_mask: bool = False
    mask: bool = True
    info: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    episode_reward: bool = False

    @property
    def n_agents(self) -> int:
        """Number of agents, which is the number of rows."""
        return len(self.agents)

    @property
    def n_actions(self) -> int:
        """Number of actions of a Discrete action space.

        Raises:
            TypeError: if the action space is not Discrete.
        """
        if not isinstance(self.action, spaces.Discrete):
            raise TypeError(
                f"n_actions needs a Discrete action space, but found {self.action}."
            )
        return int(self.action.n)

    @property
    def one_hot(self) -> bool:
        """Whether actions are stored one-hot."""
        return isinstance(self.action, spaces.Discrete) and not self.categorical_actions


@dataclass(frozen=True)
class EnvDescription:
    """Groups, spaces and guarantees of one environment.

    Attributes:
        name: used in messages, for example ``"multiwalker_v9"``.
        groups: group name to description, in the order of the keys.
        root: spaces of observations that belong to no agent, such as
            ``{"state": Box(...)}``.
        done_on_any: True if the episode ends with the first agent that is done, False
            if it ends with the last.
        repeats: whether the seed and the actions determine an episode.
        time_limit: number of frames after which the environment truncates, if known.
        pinned_seed: seed that the factory passed to the environment, if any. Every
            episode gets a seed of its own, so factories should not pass one.
    """

    name: str
    groups: Mapping[str, GroupDescription]
    root: Mapping[str, spaces.Space[object]] = field(default_factory=dict)
    done_on_any: bool = False
    repeats: bool = True
    time_limit: int | None = None
    pinned_seed: int | None = None

    def __post_init__(self) -> None:
        """Check that keys are different.

        Raises:
            TypeError: if the groups or the observations at the root are no mapping.
            ValueError: if a group is named like an observation at the root.
        """
        for name, value in {"groups": self.groups, "root": self.root}.items():
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"{name} must be a mapping from names, but is {value!r:.100}."
                )
        for name in self.groups.keys() & self.root.keys():
            raise ValueError(
                f"{self.name} has a group and an observation at the root named "
                f"{name!r}: rename one."
            )

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return groups and spaces as a table, for notebooks."""
        rows = [
            (
                name,
                f"{g.n_agents}: {', '.join(g.agents)}",
                g.observation,
                stored_action(g),
            )
            for name, g in self.groups.items()
        ]
        columns = ("group", "agents", "observation", "action")
        return notebooks.table(self.name, columns, rows)

    @property
    def group_map(self) -> dict[str, list[str]]:
        """Group name to agent names."""
        return {name: list(group.agents) for name, group in self.groups.items()}

    @property
    def group_sizes(self) -> dict[str, int]:
        """Group name to number of agents."""
        return {name: group.n_agents for name, group in self.groups.items()}

    @property
    def observation_space(self) -> spaces.Dict:
        """Spaces of all observations, batched per group, nested like the keys."""
        inner: dict[str, spaces.Space[object]] = {}
        for name, group in self.groups.items():
            observed = {"observation": batch_space(group.observation, group.n_agents)}
            inner[name] = spaces.Dict(observed)
        return spaces.Dict(inner | dict(self.root))

    @property
    def action_space(self) -> spaces.Dict:
        """Spaces of all actions, batched per group, nested like the keys."""
        return spaces.Dict(
            {
                name: spaces.Dict({"action": _batched_action(group)})
                for name, group in self.groups.items()
            }
        )

    def observed(self) -> dict[Key, Field]:
        """Fields at the root and under ``next``."""
        fields: dict[Key, Field] = {}
        for name, group in self.groups.items():
            fields |= _group_observed(name, group)
        for name, space in self.root.items():
            fields |= dict(leaves(space, (name,)))
        flag = Field((1,), np.dtype(np.bool_))
        return fields | {(name,): flag for name in FLAGS}

    def outcome(self) -> dict[Key, Field]:
        """Fields under ``next`` only."""
        fields: dict[Key, Field] = {}
        for name, group in self.groups.items():
            per_agent = Field((group.n_agents, 1), np.dtype(np.float32))
            fields[name, "reward"] = per_agent
            if group.episode_reward:
                fields[name, "episode_reward"] = per_agent
        return fields

    def actions(self) -> dict[Key, Field]:
        """The action of each group."""
        fields: dict[Key, Field] = {}
        for name, group in self.groups.items():
            space = stored_action(group)
            for key, leaf in leaves(space, (name, "action"), integers=_INT64):
                fields[key] = Field((group.n_agents, *leaf.shape), leaf.dtype)
        return fields

    def row(self) -> dict[Key, Field]:
        """All fields that an environment reads or writes in one frame."""
        return self.observed() | self.outcome() | self.actions()


def stored_action(group: GroupDescription) -> spaces.Space[object]:
    """Return one agent's action space as stored; one-hot is ``MultiBinary``."""
    if group.one_hot:
        return spaces.MultiBinary(group.n_actions)
    return group.action


@final
class OneHotRows(spaces.Box):
    """One-hot actions of several agents, ``[n_agents, n_actions]``."""

    def __init__(self, n_agents: int, n_actions: int) -> None:
        super().__init__(0, 1, (n_agents, n_actions), np.int8)

    def sample(self, mask: None = None, probability: None = None) -> Any:
        """Return rows with a single 1 each."""
        del mask, probability
        n_agents, n_actions = self.shape
        chosen = self.np_random.integers(n_actions, size=n_agents)
        return np.eye(n_actions, dtype=np.int8)[chosen]

    def contains(self, x: Any) -> bool:
        """Return whether each row has a single 1."""
        return super().contains(x) and bool((np.sum(x, axis=-1) == 1).all())


def _batched_action(group: GroupDescription) -> spaces.Space[Any]:
    if group.one_hot:
        return OneHotRows(group.n_agents, group.n_actions)
    return batch_space(stored_action(group), group.n_agents)


def leaves(
    space: spaces.Space[object],
    key: Key,
    *,
    integers: np.dtype[np.generic] | None = None,
) -> Iterator[tuple[Key, Field]]:
    """Yield the key and field of each array in a value of ``space``.

    Args:
        space: the space.
        key: prefix of the keys.
        integers: dtype of Discrete, MultiDiscrete and MultiBinary values; None for
            the dtype of each space.

    Raises:
        TypeError: if values are not arrays of fixed shape, or if torch lacks their
            dtype. The message names the key.
    """
    for path, leaf in leaf_spaces(space, key):
        if not isinstance(leaf, _STORED):
            raise TypeError(
                f"{'/'.join(path)} has the space {leaf}: expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or Dict and Tuple of these."
            )
        counted = not isinstance(leaf, spaces.Box)
        dtype = np.dtype(integers if counted and integers else leaf.dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > _WIDEST:
            raise TypeError(
                f"{'/'.join(path)} has the space {leaf} of dtype {dtype}, which torch "
                "does not have: expected bool, integers or floats of at most 64 "
                "bits."
            )
        # Torch only reads memory in native byte order.
        yield path, Field(tuple(leaf.shape or ()), dtype.newbyteorder("="))


def leaf_spaces(
    space: spaces.Space[Any], key: Key
) -> Iterator[tuple[Key, spaces.Space[Any]]]:
    """Yield the key and space of each array in a value of ``space``."""
    inner: Mapping[Any, spaces.Space[Any]]
    if isinstance(space, spaces.Dict):
        inner = space.spaces
    elif isinstance(space, spaces.Tuple):
        inner = dict(enumerate(space.spaces))
    else:
        yield key, space
        return
    for name, leaf in inner.items():
        yield from leaf_spaces(leaf, (*key, str(name)))


def from_zero(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return ``space`` with Discrete values counted from 0."""
    if isinstance(space, spaces.Discrete) and space.start != 0:
        return spaces.Discrete(space.n)
    if isinstance(space, spaces.MultiDiscrete) and space.start.any():
        return spaces.MultiDiscrete(space.nvec)
    if isinstance(space, spaces.Dict):
        return spaces.Dict({k: from_zero(inner) for k, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([from_zero(inner) for inner in space.spaces])
    return space


def _group_observed(name: str, group: GroupDescription) -> dict[Key, Field]:
    n = group.n_agents
    boolean = np.dtype(np.bool_)
    fields = {
        key: Field((n, *leaf.shape), leaf.dtype)
        for key, leaf in leaves(group.observation, (name, "observation"))
    }
    if group.action_mask:
        fields[name, "action_mask"] = Field((n, group.n_actions), boolean)
    if group.mask:
        fields[name, "mask"] = Field((n,), boolean)
    for info, shape in group.info.items():
        fields[name, "info", info] = Field((n, *shape), np.dtype(np.float32))
    for flag in FLAGS:
        fields[name, flag] = Field((n, 1), boolean)
    return fields


def allocate(
    fields: Fields, batch: tuple[int, ...] = ()
) -> dict[Key, NDArray[np.generic]]:
    """Return zeroed arrays of shape ``[*batch, *field.shape]``.

    Small arrays are adjacent, so that they can be copied together.
    """
    sizes = {key: leaf.nbytes * prod(batch) for key, leaf in fields.items()}
    offsets: dict[Key, int] = {}
    end = 0
    for key in sorted(fields, key=lambda key: sizes[key] > SMALL):
        unit = ALIGNMENT if sizes[key] > SMALL else _WORD
        offsets[key] = -(-end // unit) * unit
        end = offsets[key] + sizes[key]
    memory = np.zeros(end + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    arrays: dict[Key, NDArray[np.generic]] = {}
    for key, leaf in fields.items():
        start = skip + offsets[key]
        block = memory[start : start + sizes[key]]
        arrays[key] = block.view(leaf.dtype).reshape((*batch, *leaf.shape))
    return arrays


def places(sizes: Iterable[int]) -> list[int]:
    """Return where arrays of these sizes begin, one after the other, and the end."""
    return list(accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0))


def bytes_of(array: NDArray[np.generic]) -> memoryview:
    """Return the memory of a dense, non-empty array as bytes."""
    memory: Any = array.reshape(-1)
    return memoryview(memory).cast("B")
