"""Groups of agents that share a tensor.

A *group* is a named, ordered set of agents whose observations and actions have
the same shapes, so that they fit in one tensor ``[*B, n_agents, ...]``. Row ``i`` of a
group's tensors belongs to agent ``group_map[name][i]``.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

GroupMap = Mapping[str, Sequence[Hashable]]
"""Group to agents, by the names that the environment gives them: usually strings."""

RESERVED = frozenset(
    [
        "action",
        "collector",
        "done",
        "is_init",
        "next",
        "policy_version",
        "state",
        "step_count",
        "terminated",
        "truncated",
    ]
)
"""Keys of a batch. A group must not have one of these names."""


class MarlGroupMapType(enum.Enum):
    """Predefined group maps."""

    ALL_IN_ONE_GROUP = "all_in_one_group"
    ONE_GROUP_PER_AGENT = "one_group_per_agent"

    def get_group_map(self, agent_names: Sequence[str]) -> dict[str, list[str]]:
        """Return ``{"agents": [...]}`` or ``{name: [name], ...}``."""
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agent_names)}
        return {name: [name] for name in agent_names}


def group_by_prefix(agents: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Put agents called ``<prefix>_<number>`` into the group ``<prefix>``.

    An agent with any other name joins the group of that name.

    Args:
        agents: agent names, in the order of their rows.

    Returns:
        Group name to agent names. Groups are in order of first appearance.

    Example:
        >>> group_by_prefix(["wolf_0", "wolf_1", "shepherd"])
        {'wolf': ('wolf_0', 'wolf_1'), 'shepherd': ('shepherd',)}
    """
    groups: dict[str, list[str]] = {}
    for agent in agents:
        prefix, _, number = agent.rpartition("_")
        group = prefix if prefix and number.isdecimal() else agent
        groups.setdefault(group, []).append(agent)
    return {group: tuple(members) for group, members in groups.items()}


def explicit_groups(
    group_map: MarlGroupMapType | GroupMap | str,
    agents: Sequence[str],
    others: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Return the user's group map as a dictionary of lists.

    A ``MarlGroupMapType`` may be given by its value, such as ``"all_in_one_group"``, or
    be TorchRL's member of the same name. ``others`` are strings that the caller
    accepts, for the message.

    Raises:
        ValueError: for a string that names no ``MarlGroupMapType``.
        TypeError: if ``group_map`` is nothing of this.
    """
    names = [kind.value for kind in MarlGroupMapType]
    if type(group_map).__name__ == MarlGroupMapType.__name__:  # TorchRL's or ours.
        group_map = MarlGroupMapType[cast("enum.Enum", group_map).name]
    if isinstance(group_map, str):
        if group_map not in names:
            raise ValueError(
                f"group_map must be one of {[*others, *names]}, or a mapping from "
                f"group to agents, but is {group_map!r}."
            )
        group_map = MarlGroupMapType(group_map)
    if isinstance(group_map, MarlGroupMapType):
        return group_map.get_group_map(agents)
    if not isinstance(group_map, Mapping):
        raise TypeError(
            "group_map must be a mapping from group to agents or a MarlGroupMapType, "
            f"but is {group_map!r} of type {type(group_map).__name__}."
        )
    return {name: list(members) for name, members in group_map.items()}


def check_groups(groups: GroupMap, agents: Iterable[str]) -> None:
    """Check that ``groups`` names every agent exactly once.

    Raises:
        ValueError: if not. The message lists the agents that are missing, unknown or
            repeated, and the groups that are empty or have an impossible name.
    """
    known = set(agents)
    counts = Counter(agent for members in groups.values() for agent in members)
    problems = {
        "missing": sorted(known - counts.keys()),
        "unknown": sorted(counts.keys() - known, key=str),
        "repeated": sorted((a for a, n in counts.items() if n > 1), key=str),
        "empty groups": [name for name, members in groups.items() if not members],
        "group names that are empty or no text": [
            name for name in groups if not isinstance(name, str) or not name
        ],
        "reserved group names": sorted(RESERVED & groups.keys()),
    }
    listed = "; ".join(f"{kind}: {names}" for kind, names in problems.items() if names)
    if listed:
        raise ValueError(
            f"group_map must name every agent exactly once, but found {listed}. "
            f"The environment's agents are {sorted(known)}."
        )
