"""Converts our descriptions to TorchRL's specs, and TorchRL's specs to spaces.

Imported by ``marl_collect.interop.torchrl`` only.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)

from marl_collect.core.description import (
    FLAGS,
    EnvDescription,
    Field,
    Key,
    leaf_spaces,
    leaves,
)

Space = spaces.Space[object]
Shape = tuple[int, ...]

REWARD_SUM = "episode_reward"
_BOOL: Any = np.bool_


def observation_spec(description: EnvDescription, batch: Shape) -> Composite:
    """Return the spec of all entries that a reset writes, except the flags.

    It includes ``episode_reward``, as with TorchRL's ``RewardSum``. Bounds are widened
    to include 0, because the rows of dead agents are zeros.
    """
    specs: dict[Key, TensorSpec] = {}
    for name, group in description.groups.items():
        lead = (*batch, group.n_agents)
        for key, space in leaf_spaces(group.observation, (name, "observation")):
            specs[key] = _spec(space, lead, with_zero=True)
        if group.action_mask:
            shape = (*lead, group.n_actions)
            specs[name, "action_mask"] = Binary(shape=shape, dtype=torch.bool)
        if group.mask:
            specs[name, "mask"] = Binary(shape=lead, dtype=torch.bool)
        for info, shape in group.info.items():
            specs[name, "info", info] = Unbounded((*lead, *shape))
        if group.episode_reward:
            specs[name, REWARD_SUM] = Unbounded((*lead, 1))
    for name, space in description.root.items():
        for key, leaf in leaf_spaces(space, (name,)):
            specs[key] = _spec(leaf, batch, with_zero=True)
    return nest(specs, description, batch)


def action_spec(description: EnvDescription, batch: Shape) -> Composite:
    """Return the spec of all actions."""
    specs: dict[Key, TensorSpec] = {}
    for name, group in description.groups.items():
        lead = (*batch, group.n_agents)
        if group.one_hot:
            n = group.n_actions
            specs[name, "action"] = OneHot(n, (*lead, n), dtype=torch.int64)
            continue
        for key, space in leaf_spaces(group.action, (name, "action")):
            specs[key] = _spec(space, lead, with_zero=False, integers=np.dtype("int64"))
    return nest(specs, description, batch)


def reward_spec(description: EnvDescription, batch: Shape) -> Composite:
    """Return the spec of all rewards."""
    specs: dict[Key, TensorSpec] = {
        (name, "reward"): Unbounded((*batch, group.n_agents, 1))
        for name, group in description.groups.items()
    }
    return nest(specs, description, batch)


def done_spec(description: EnvDescription, batch: Shape) -> Composite:
    """Return the spec of the flags of all groups and of the root."""
    specs: dict[Key, TensorSpec] = {}
    for flag in FLAGS:
        specs[flag,] = Categorical(2, (*batch, 1), dtype=torch.bool)
        for name, group in description.groups.items():
            shape = (*batch, group.n_agents, 1)
            specs[name, flag] = Categorical(2, shape, dtype=torch.bool)
    return nest(specs, description, batch)


def nest(
    specs: Mapping[Key, TensorSpec], description: EnvDescription, batch: Shape
) -> Composite:
    """Nest specs by their keys; specs of a group have the batch size ``[*B, n]``."""
    root = Composite(shape=batch)
    for key, spec in specs.items():
        node, shape = root, batch
        for name in key[:-1]:
            if node is root and name in description.groups:
                shape = (*batch, description.groups[name].n_agents)
            if name not in node.keys():
                node[name] = Composite(shape=shape)
            node = node[name]
        node[key[-1]] = spec
    return root


def space_of(
    spec: TensorSpec, lead: Shape, where: str, *, is_action: bool = False
) -> Space:
    """Return the space of one agent.

    Args:
        spec: of all agents; Composite specs become Dict spaces.
        lead: leading dimensions, which are not part of the space: ``(n,)`` or ``()``.
        where: the key, for messages.
        is_action: whether bool values are stored as integers. Otherwise they stay bool,
            because policies use them as masks, such as that of ``InitTracker``.

    Raises:
        TypeError: if no space corresponds to the spec.
    """
    if isinstance(spec, Composite):
        inner = {
            k: space_of(v, lead, f"{where}/{k}", is_action=is_action)
            for k, v in spec.items()
        }
        return cast("Space", spaces.Dict(inner))
    shape = tuple(spec.shape)
    if shape[: len(lead)] != lead:
        raise TypeError(
            f"{where} has the shape {list(shape)}: expected the agents' dimensions "
            f"{list(lead)} first, followed by the shape of one agent."
        )
    if spec.dtype == torch.bool and not is_action:
        return cast("Space", spaces.Box(0, 1, shape[len(lead) :], _BOOL))
    return cast("Space", _space(spec, shape[len(lead) :], len(lead), where))


def _space(spec: TensorSpec, shape: Shape, dims: int, where: str) -> spaces.Space[Any]:
    # MultiCategorical and Binary are subclasses of Categorical, so test them first.
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(
            spec.nvec.expand(spec.shape)[(0,) * dims].cpu().numpy()
        )
    if isinstance(spec, (Binary, OneHot)):
        return spaces.MultiBinary(shape or (1,))
    if isinstance(spec, Categorical):
        n = int(spec.space.n)
        return spaces.MultiDiscrete(np.full(shape, n)) if shape else spaces.Discrete(n)
    if isinstance(spec, (Bounded, Unbounded)):
        if spec.dtype == torch.bool:
            return spaces.MultiBinary(shape or (1,))
        low, high = (
            bound.expand(spec.shape).cpu().numpy()
            for bound in (spec.space.low, spec.space.high)
        )
        rows = tuple(range(dims))
        dtype: Any = low.dtype
        return spaces.Box(low.min(rows), high.max(rows), shape, dtype)
    raise TypeError(
        f"{where} has the spec {spec}: expected Bounded, Unbounded, Categorical, "
        "OneHot, MultiCategorical, Binary, or a Composite of these. Remove or convert "
        "the entry with a transform of the TorchRL environment."
    )


def _spec(
    space: Space,
    lead: Shape,
    *,
    with_zero: bool,
    integers: np.dtype[np.generic] | None = None,
) -> TensorSpec:
    ((_, field),) = leaves(space, ("value",), integers=integers)
    shape = (*lead, *field.shape)
    dtype = torch.from_numpy(np.zeros(0, field.dtype)).dtype
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=shape, dtype=dtype)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        if not np.any(space.start):
            if isinstance(space, spaces.Discrete):
                return Categorical(int(space.n), shape, dtype=dtype)
            if space.nvec.ndim == 1:
                nvec = torch.as_tensor(space.nvec, device="cpu")
                return MultiCategorical(nvec, shape, dtype=dtype)
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return _box(
            space.start, space.start + sizes - 1, field, lead, with_zero=with_zero
        )
    assert isinstance(space, spaces.Box)
    return _box(space.low, space.high, field, lead, with_zero=with_zero)


def _box(low: Any, high: Any, field: Field, lead: Shape, *, with_zero: bool) -> Any:
    dtype = torch.from_numpy(np.zeros(0, field.dtype)).dtype
    shape = (*lead, *field.shape)
    if dtype == torch.bool:
        return Binary(shape=shape, dtype=dtype)
    if np.isinf(low).all() and np.isinf(high).all():
        return Unbounded(shape, dtype=dtype)
    if with_zero:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    bounds = [
        torch.from_numpy(np.broadcast_to(np.asarray(b, field.dtype), shape).copy())
        for b in (low, high)
    ]
    return Bounded(*bounds, shape=shape, dtype=dtype)
