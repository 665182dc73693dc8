"""Divides the agents of a PettingZoo environment into groups, and finds their masks.

The source of action masks is determined once, for all agents, because a single reset
does not show agents that join later. The size of a mask follows from the action space.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from gymnasium import spaces

from marl_collect.core.description import GroupDescription, leaves
from marl_collect.core.groups import (
    RESERVED,
    GroupMap,
    MarlGroupMapType,
    check_groups,
    explicit_groups,
    group_by_prefix,
)

Space: TypeAlias = "spaces.Space[Any]"
MaskSource: TypeAlias = Literal["auto", "observation", "info"] | None
Infos: TypeAlias = Mapping[Any, Any]

ACTION_MASK = "action_mask"
_SOURCES = ("auto", "observation", "info", None)


@dataclass(frozen=True)
class AgentSpec:
    """Group, row and spaces of an agent.

    Attributes:
        agent: PettingZoo's identifier, usually a string.
        name: the identifier as a string.
        group: name of the group.
        row: index in the group.
        observation: observation space without action mask and agent identity.
        action: action space, with PettingZoo's ``start``.
        mask_in: source of the action mask: ``"observation"``, ``"info"``, or ``""`` if
            there is none.
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
        ValueError: if a group map does not name every agent exactly once.
        TypeError: if ``chosen`` is not a group map.
    """
    names = [spec.name for spec in specs]
    if chosen is None:
        if not parallel:
            chosen = MarlGroupMapType.ONE_GROUP_PER_AGENT
        else:
            return _split_unlike(group_by_prefix(names), specs)
    groups = explicit_groups(chosen, names)
    by_agent = {spec.agent: spec.name for spec in specs}
    groups = {
        group: [by_agent.get(agent, agent) for agent in members]
        for group, members in groups.items()
    }
    check_groups(groups, names)
    return groups


def describe_groups(
    specs: list[AgentSpec], chosen: MarlGroupMapType | GroupMap | None
) -> dict[str, GroupDescription]:
    """Describe the groups of agents that act simultaneously, in every world alike.

    Raises:
        ValueError: if a group map does not name every agent exactly once, or puts
            agents with different spaces into one group.
        TypeError: if ``chosen`` is not a group map.
    """
    by_name = {spec.name: spec for spec in specs}
    members = group_agents(specs, chosen, parallel=True)
    for group, agents in members.items():
        check_alike(group, [by_name[agent] for agent in agents])
    first = {group: by_name[agents[0]] for group, agents in members.items()}
    return {
        group: GroupDescription(
            tuple(agents),
            first[group].observation,
            first[group].action,
            action_mask=bool(first[group].mask_in),
        )
        for group, agents in members.items()
    }


def _split_unlike(
    groups: Mapping[str, Sequence[str]], specs: list[AgentSpec]
) -> dict[str, list[str]]:
    """Split groups whose agents have different spaces."""
    by_name = {spec.name: spec for spec in specs}
    kinds_of: dict[str, list[list[str]]] = {}
    for group, names in groups.items():
        kinds = kinds_of[group] = []
        for name in names:
            kind = next(
                (k for k in kinds if _alike(by_name[k[0]], by_name[name])), None
            )
            kinds.append([name]) if kind is None else kind.append(name)
    # MPE has agents called "collector", which is a key of every batch.
    kept = {g for g, k in kinds_of.items() if len(k) == 1 and g not in RESERVED}
    split: dict[str, list[str]] = {}
    for group, kinds in kinds_of.items():
        for i, kind in enumerate(kinds):
            name = group
            if group not in kept:
                name += "_agents" if len(kinds) == 1 else f"_kind{i}"
                while name in kept or name in split:
                    name += "_"
            split[name] = kind
    return split


def _signature(spec: AgentSpec) -> tuple[object, ...]:
    observed = [
        (key, leaf.shape, leaf.dtype.str)
        for key, leaf in leaves(spec.observation, ("observation",))
    ]
    return (tuple(observed), spec.mask_in, _kind(spec.observation))


def _kind(space: Space) -> object:
    """What must be equal apart from shapes, such as the size of Discrete spaces."""
    if isinstance(space, spaces.Dict):
        return tuple((key, _kind(inner)) for key, inner in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return tuple(_kind(inner) for inner in space.spaces)
    return type(space).__name__ if isinstance(space, spaces.Box) else repr(space)


def _alike(a: AgentSpec, b: AgentSpec) -> bool:
    return a.action == b.action and _signature(a) == _signature(b)


def check_alike(group: str, specs: Iterable[AgentSpec]) -> None:
    """Check that the agents of a group have the same spaces.

    Raises:
        ValueError: if they differ; names two such agents and the alternatives.
    """
    first, *rest = specs
    for other in rest:
        if not _alike(first, other):
            raise ValueError(
                f"All agents of group {group!r} must have the same spaces, but "
                f"{_summary(first)}, and {_summary(other)}. Put them into different "
                f"groups: pass group_map={{{first.name!r}: [{first.name!r}], "
                f"{other.name!r}: [{other.name!r}], ...}}, or "
                "MarlGroupMapType.ONE_GROUP_PER_AGENT, or leave group_map out if the "
                "environment is parallel."
            )


def _summary(spec: AgentSpec) -> str:
    mask = f"an action mask in its {spec.mask_in}" if spec.mask_in else "no mask"
    dtypes = [str(leaf.dtype) for _, leaf in leaves(spec.observation, ())]
    return (
        f"{spec.name} observes {spec.observation} ({', '.join(dtypes)}), has {mask} "
        f"and acts in {spec.action}"
    )


def with_text_keys(space: Space, where: str) -> Space:
    """Return ``space`` with the keys of Dict spaces as strings, as in a batch.

    Args:
        space: the space.
        where: what has the space, for messages.

    Raises:
        ValueError: if two keys are the same string.
    """
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([with_text_keys(part, where) for part in space.spaces])
    if not isinstance(space, spaces.Dict):
        return space
    named = {
        str(key): with_text_keys(part, f"{where}/{key}")
        for key, part in space.spaces.items()
    }
    if len(named) < len(space.spaces):
        raise ValueError(
            f"{where} has a Dict space whose keys {list(space.spaces)} must differ as "
            "strings, because keys of batches are strings: rename them."
        )
    return spaces.Dict(named)


def parts_of(space: Space) -> list[tuple[Any, Space]]:
    """Return the entries of a Dict or Tuple space: key or index, and space."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(cast("Any", space).spaces))


def mask_sources(
    observations: Mapping[Any, Space],
    actions: Mapping[Any, Space],
    chosen: MaskSource,
    infos_of: Callable[[], Infos],
    name: str,
) -> dict[Any, str]:
    """Return the source for each agent: ``"observation"``, ``"info"`` or ``""``.

    Args:
        observations: agent to observation space.
        actions: agent to action space.
        chosen: the option ``action_mask``.
        infos_of: returns the infos of a reset; called only if needed.
        name: name of the environment, for messages.

    Raises:
        ValueError: if the source is unknown, if no agent has it, or if an agent whose
            actions are not Discrete has a mask.
    """
    if chosen not in _SOURCES:
        raise ValueError(
            f"action_mask must be one of {list(_SOURCES)}, but is {chosen!r}."
        )
    sources = dict.fromkeys(observations, "")
    if chosen in ("auto", "observation"):
        holders = [a for a, space in observations.items() if _holds_mask(space)]
        sources |= dict.fromkeys(holders, "observation")
        if chosen == "observation" and not holders:
            raise ValueError(
                f"{name}: action_mask='observation' needs Dict observation spaces with "
                f"the entry {ACTION_MASK!r}, but found "
                f"{list(observations.values())!r:.200}."
            )
    discrete = [a for a, space in actions.items() if isinstance(space, spaces.Discrete)]
    if chosen == "info" and not discrete:
        raise ValueError(
            f"{name}: action_mask='info' needs Discrete action spaces, but found "
            f"{list(actions.values())!r:.200}."
        )
    open_ = [agent for agent in discrete if not sources[agent]]
    if chosen == "info" or (
        chosen == "auto" and open_ and _any_mask(infos_of(), observations, name)
    ):
        sources |= dict.fromkeys(open_, "info")
    _require_discrete(sources, actions, name)
    return sources


def info_of(infos: Infos, agent: Any, name: str) -> Mapping[str, Any] | None:
    """Return an agent's info, if there is one. Infos may have keys of other things.

    Args:
        infos: of an environment.
        agent: the agent.
        name: name of the environment, for messages.

    Raises:
        TypeError: if the info is not a mapping.
    """
    info = infos.get(agent)
    if info is None or isinstance(info, (dict, Mapping)):
        return info
    raise TypeError(
        f"{name}: the info of agent {agent} must be a dict, but is {summary(info)} of "
        f"type {type(info).__name__}."
    )


def mask_of(info: Mapping[str, Any] | None) -> Any:
    """Return the action mask in an agent's info, or None."""
    return info.get(ACTION_MASK) if info else None


def ignored_mask(agent: Any, where: str) -> ValueError:
    """Return the error for a mask that would be ignored."""
    return ValueError(
        f"The {where} of agent {agent} has an {ACTION_MASK!r}, which would be ignored: "
        "no mask was found for this agent when the environment was built. For masks in "
        "infos pass action_mask='info'. For masks in observations give the agent a "
        f"Dict observation space with an entry {ACTION_MASK!r}. To ignore masks pass "
        "action_mask=None. Only Discrete actions can be masked."
    )


def _holds_mask(space: Space) -> bool:
    return isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces


def _any_mask(infos: Infos, agents: Iterable[Any], name: str) -> bool:
    masks = (mask_of(info_of(infos, agent, name)) for agent in agents)
    return any(mask is not None for mask in masks)


def _require_discrete(
    sources: Mapping[Any, str], actions: Mapping[Any, Space], name: str
) -> None:
    masked: Sequence[Any] = [agent for agent, source in sources.items() if source]
    for agent in masked:
        if not isinstance(actions[agent], spaces.Discrete):
            raise ValueError(  # noqa: TRY004 - the environment is at fault
                f"{name}: agent {agent} has an action mask, but its action space is "
                f"{actions[agent]}: only Discrete actions can be masked. Pass "
                "action_mask=None to keep the mask as an ordinary observation."
            )


def summary(value: object) -> str:
    """Return a short description of ``value``, for messages."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
