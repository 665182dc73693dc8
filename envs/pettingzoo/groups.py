"""Which agents of a PettingZoo environment share tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from gymnasium import spaces

from marl_collect.core.description import leaves
from marl_collect.core.groups import (
    RESERVED,
    GroupMap,
    MarlGroupMapType,
    check_groups,
    explicit_groups,
    group_by_prefix,
)

Space: TypeAlias = "spaces.Space[Any]"


@dataclass(frozen=True)
class AgentSpec:
    """Where an agent's data stand, and what its spaces are.

    Attributes:
        agent: PettingZoo's identifier, mostly a string.
        name: the identifier as a string.
        group: name of the group.
        row: index in the group.
        observation: its observation space without action mask and identity.
        action: its action space, with PettingZoo's ``start``.
        mask_in: where its action mask comes from: ``"observation"``, ``"info"``, or
            ``""`` if it has none.
    """

    agent: Any
    name: str
    group: str
    row: int
    observation: Space
    action: Space
    mask_in: str = ""


def group_agents(
    specs: list[AgentSpec],
    chosen: MarlGroupMapType | GroupMap | None,
    *,
    parallel: bool,
) -> dict[str, list[str]]:
    """Return group name to agent names.

    Raises:
        ValueError: if a given group map does not name every agent exactly once.
        TypeError: if it is no map.
    """
    names = [spec.name for spec in specs]
    if chosen is None:
        if not parallel:
            chosen = MarlGroupMapType.ONE_GROUP_PER_AGENT
        else:
            return _split_unlike(group_by_prefix(names), specs)
    groups = explicit_groups(chosen, names)
    check_groups(groups, names)
    return groups


def _split_unlike(
    groups: Mapping[str, Sequence[str]], specs: list[AgentSpec]
) -> dict[str, list[str]]:
    """Part agents of one prefix whose shapes differ into groups of their own."""
    by_name = {spec.name: spec for spec in specs}
    split: dict[str, list[str]] = {}
    for group, names in groups.items():
        kinds: list[list[str]] = []
        for name in names:
            kind = next(
                (k for k in kinds if _alike(by_name[k[0]], by_name[name])), None
            )
            kinds.append([name]) if kind is None else kind.append(name)
        if len(kinds) == 1:
            # MPE calls agents "collector", which is where a collector writes.
            free = f"{group}_agents" if group in RESERVED else group
            split[free] = kinds[0]
        else:
            split |= {f"{group}_kind{i}": kind for i, kind in enumerate(kinds)}
    return split


def _signature(spec: AgentSpec) -> tuple[object, ...]:
    observed = [
        (key, leaf.shape, leaf.dtype.str)
        for key, leaf in leaves(spec.observation, ("observation",))
    ]
    return (tuple(observed), spec.mask_in, _kind(spec.observation))


def _kind(space: Space) -> object:
    """What must be equal beside shapes: how many values Discrete spaces have."""
    if isinstance(space, spaces.Dict):
        return tuple((key, _kind(inner)) for key, inner in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return tuple(_kind(inner) for inner in space.spaces)
    return type(space).__name__ if isinstance(space, spaces.Box) else repr(space)


def _alike(a: AgentSpec, b: AgentSpec) -> bool:
    return a.action == b.action and _signature(a) == _signature(b)


def check_alike(group: str, members: Iterable[AgentSpec]) -> None:
    """Check that the members of a group have the same spaces.

    Raises:
        ValueError: naming two agents that differ, and the ways out.
    """
    first, *rest = members
    for other in rest:
        if not _alike(first, other):
            raise ValueError(
                f"Group {group!r} must hold agents with the same spaces, but "
                f"{_summary(first)}, {_summary(other)}. Put them into groups of their "
                f"own: group_map={{{first.name!r}: [{first.name!r}], "
                f"{other.name!r}: [{other.name!r}]}} with all other agents, "
                "MarlGroupMapType.ONE_GROUP_PER_AGENT, or, in parallel environments, "
                "leave group_map out."
            )


def _summary(spec: AgentSpec) -> str:
    mask = f"an action mask in its {spec.mask_in}" if spec.mask_in else "no mask"
    dtypes = [str(leaf.dtype) for _, leaf in leaves(spec.observation, ())]
    return (
        f"{spec.name} observes {spec.observation} ({', '.join(dtypes)}), has {mask} "
        f"and acts in {spec.action}"
    )


def parts_of(space: Space) -> list[tuple[Any, Space]]:
    """Return the entries of a Dict or Tuple space: key or index, and space."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(cast("Any", space).spaces))
