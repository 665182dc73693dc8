"""Determines the source of a PettingZoo environment's action masks.

The source is determined once, for all agents, because a single reset does not show
agents that join later. The size of a mask follows from the action space.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from gymnasium import spaces

from marl_collect.envs.pettingzoo.groups import Space
from marl_collect.envs.pettingzoo.writers import summary

ACTION_MASK = "action_mask"

MaskSource: TypeAlias = Literal["auto", "observation", "info"] | None
Infos: TypeAlias = Mapping[Any, Any]

SOURCES = ("auto", "observation", "info", None)


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
    if chosen not in SOURCES:
        raise ValueError(
            f"action_mask must be one of {list(SOURCES)}, but is {chosen!r}."
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
