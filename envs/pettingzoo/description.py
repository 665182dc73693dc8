"""Derives groups, spaces and rows from a PettingZoo environment."""

from collections.abc import (
    Collection,
    Hashable,
    KeysView,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    from_zero,
    leaves,
)
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import unbounded
from marl_collect.envs.pettingzoo.groups import (
    ACTION_MASK,
    AgentSpec,
    MaskSource,
    Space,
    check_alike,
    group_agents,
    info_of,
    mask_sources,
    with_text_keys,
)
from marl_collect.options import Option, Options, require

Zoo: TypeAlias = "ParallelEnv[Any, Any, Any] | AECEnv[Any, Any, Any]"

AGENT_ID = "agent_id"

Absent: TypeAlias = Literal["dead", "waiting"]
"""The meaning of an agent that is missing in ``agents`` without having ended."""

_SWITCHES = (
    *("return_state", "use_mask", "categorical_actions", "agent_ids"),
    *("episode_reward", "repeats"),
)
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_SWITCHES, bool),
    "done_on_any": bool | None,
    "time_limit": int | None,
}
"""Types of options whose values could be mistaken for others, such as ``"no"``."""


@dataclass(frozen=True, kw_only=True)
class PettingZooOptions(Options):
    """The keywords of ``PettingZooEnv`` that determine the layout of the data."""

    return_state: bool = False
    group_map: MarlGroupMapType | GroupMap | None = None
    use_mask: bool = True
    categorical_actions: bool = True
    done_on_any: bool | None = None
    agent_ids: bool = False
    info_keys: Sequence[str] | Mapping[str, tuple[int, ...]] = ()
    episode_reward: bool = False
    seed: int | None = None
    repeats: bool = True
    action_mask: MaskSource = "auto"
    time_limit: int | None = None
    absent: Absent = "dead"

    def __post_init__(self) -> None:
        """Check what does not depend on the environment."""
        for name, kind in _KINDS.items():
            require(name, getattr(self, name), kind, Option(""))
        if self.absent not in get_args(Absent):
            raise ValueError(
                f"absent must be 'dead' or 'waiting', but is {self.absent!r}."
            )
        if self.time_limit is not None and self.time_limit < 1:
            raise ValueError(
                f"time_limit must be at least 1, but is {self.time_limit}."
            )

    def with_limit(self, limit: int | None) -> "PettingZooOptions":
        """Return these options with the shorter of their time limit and ``limit``."""
        limits = [frames for frames in (self.time_limit, limit) if frames is not None]
        return replace(self, time_limit=min(limits, default=None))


def split_options(
    arguments: Mapping[str, Any],
) -> tuple[PettingZooOptions, dict[str, Any]]:
    """Separate the keywords of ``PettingZooWrapper`` from a task's arguments.

    Returns:
        The options, and the arguments of the task.
    """
    names = {field.name for field in fields(PettingZooOptions)}
    chosen = {name: value for name, value in arguments.items() if name in names}
    rest = {name: value for name, value in arguments.items() if name not in names}
    return PettingZooOptions(**chosen), rest


def check_reset(
    begun: Any,
) -> tuple[Mapping[Any, Any], Mapping[Any, Mapping[str, Any]]]:
    """Check what a parallel ``reset`` returned: observations and infos.

    Raises:
        TypeError: if it returned anything else. Old versions of PettingZoo did.
    """
    parts: Any = begun
    if isinstance(begun, tuple) and len(parts) == 2:
        observations, infos = parts
        if isinstance(observations, Mapping) and isinstance(infos, Mapping):
            return parts
    raise TypeError(
        "reset() must return (observations, infos), two mappings by agent, but "
        f"returned {begun!r:.200}"
    )


def as_list(agents: Any, name: str) -> list[Any]:
    """Return ``env.agents`` as a list; it may be another sequence.

    Raises:
        TypeError: if it is none.
    """
    if isinstance(agents, np.ndarray):
        agents = agents.tolist()
    if isinstance(agents, list):
        return agents
    try:
        return list(agents)
    except TypeError:
        raise TypeError(
            f"{name}: env.agents must be a list of agents, but is {agents!r:.200}."
        ) from None


class FirstReset:
    """The environment's first reset, which is done on first use."""

    def __init__(self, env: Zoo, seed: int) -> None:
        """Store the environment and the seed of its reset."""
        self._env = env
        self._seed = seed

    @cached_property
    def infos(self) -> Mapping[Any, Mapping[str, Any]]:
        """Infos of the agents after the reset."""
        if isinstance(self._env, ParallelEnv):
            return check_reset(self._env.reset(seed=self._seed))[1]
        self._env.reset(seed=self._seed)
        return cast("Mapping[Any, Mapping[str, Any]]", self._env.infos)

    def state(self) -> Any:
        """The state after the reset."""
        assert self.infos is not None  # resets the environment
        return self._env.state()


def describe(
    env: Zoo, name: str, options: PettingZooOptions
) -> tuple[EnvDescription, list[AgentSpec]]:
    """Determine groups and spaces.

    Args:
        env: a parallel or AEC environment. It is reset if its spaces do not determine
            everything that ``options`` request.
        name: name of the environment.
        options: see ``PettingZooEnv``.

    Returns:
        The description, and the spec of each agent in the order of
        ``possible_agents``.

    Raises:
        ValueError: if spaces or groups do not fit; names the agents.
        TypeError: if a space is not an array of fixed shape; names the key.
    """
    parallel = isinstance(env, ParallelEnv)
    if not parallel and not options.use_mask:
        raise ValueError(
            f"{name} is turn-based (AEC), so the mask is needed to know which agent "
            "acts. Leave use_mask=True."
        )
    if options.absent == "waiting" and not options.use_mask:
        raise ValueError(
            f"{name}: absent='waiting' needs use_mask=True, because only the mask says "
            "which agents act."
        )
    agents = _possible_agents(env, name)
    first_reset = FirstReset(env, options.seed or 0)
    ungrouped = _ungrouped_specs(env, agents, options.action_mask, first_reset, name)
    grouped = group_agents(ungrouped, options.group_map, parallel=parallel)
    specs = {spec.name: spec for spec in ungrouped}
    groups: dict[str, GroupDescription] = {}
    infos = _info_shapes(options.info_keys, first_reset, agents, name)
    for group, names in grouped.items():
        agents_of_group = [specs[n] for n in names]
        check_alike(group, agents_of_group)
        for row, spec in enumerate(agents_of_group):
            specs[spec.name] = replace(spec, group=group, row=row)
        groups[group] = _describe_group(group, agents_of_group, options, infos)
    description = EnvDescription(
        name=name,
        groups=groups,
        root=_root(env, name, options, first_reset),
        done_on_any=parallel if options.done_on_any is None else options.done_on_any,
        repeats=options.repeats,
        time_limit=options.time_limit,
        pinned_seed=options.seed,
    )
    description.row()  # raises an error for spaces without a fixed shape
    return description, [specs[spec.name] for spec in ungrouped]


def _possible_agents(env: Zoo, name: str) -> list[Any]:
    listed: Any = getattr(env, "possible_agents", None)
    agents = listed.tolist() if isinstance(listed, np.ndarray) else listed
    # The order of a set differs between processes.
    unordered = isinstance(agents, (str, Set)) and not isinstance(agents, KeysView)
    if unordered or not isinstance(agents, Collection) or not agents:
        agents = ()
    if not agents or not all(isinstance(agent, Hashable) for agent in agents):
        raise ValueError(
            f"{name} must have a list possible_agents of all agents that may ever "
            f"appear, because it determines the rows, but found {listed!r}."
        )
    names = list(map(str, agents))
    repeated = {agent for agent in names if names.count(agent) > 1}
    if repeated:
        raise ValueError(
            f"{name}: possible_agents must name each agent once, but "
            f"{sorted(repeated)} appear more than once."
        )
    return list(agents)


def _ungrouped_specs(
    env: Zoo,
    agents: Sequence[Any],
    chosen: MaskSource,
    first_reset: FirstReset,
    name: str,
) -> list[AgentSpec]:
    """Return the specs of ``agents``, without groups and rows."""
    observed: dict[Any, Space] = {a: env.observation_space(a) for a in agents}
    acted: dict[Any, Space] = {a: env.action_space(a) for a in agents}
    sources = mask_sources(observed, acted, chosen, lambda: first_reset.infos, name)
    specs = []
    for agent in agents:
        space = observed[agent]
        if sources[agent] == "observation":
            parts = cast("spaces.Dict", space).spaces
            rest = {key: part for key, part in parts.items() if key != ACTION_MASK}
            space = spaces.Dict(rest)
        for part, key in ((space, "observation"), (acted[agent], "action")):
            named = with_text_keys(part, f"{agent}/{key}")
            dict(leaves(named, (str(agent), key)))  # raises errors with the agent
        spec = AgentSpec(agent, str(agent), "", 0, space, acted[agent], sources[agent])
        specs.append(spec)
    return specs


def _describe_group(
    group: str,
    specs: Sequence[AgentSpec],
    options: PettingZooOptions,
    infos: Mapping[str, tuple[int, ...]],
) -> GroupDescription:
    first = specs[0]
    observation = _union(
        [with_text_keys(spec.observation, spec.name) for spec in specs]
    )
    if options.agent_ids:
        observation = _with_identity(observation, len(specs), group)
    return GroupDescription(
        agents=tuple(spec.name for spec in specs),
        observation=observation,
        action=from_zero(with_text_keys(first.action, first.name)),
        categorical_actions=options.categorical_actions,
        action_mask=bool(first.mask_in),
        mask=options.use_mask,
        info=infos,
        episode_reward=options.episode_reward,
    )


def _union(observed: Sequence[Space]) -> Space:
    """Return the smallest space of one agent that contains all of these spaces."""
    first = observed[0]
    if isinstance(first, spaces.Dict):
        return spaces.Dict(
            {
                key: _union([cast("spaces.Dict", space)[key] for space in observed])
                for key in first.spaces
            }
        )
    if isinstance(first, spaces.Box) and any(space != first for space in observed):
        boxes = cast("Sequence[spaces.Box]", observed)
        low = np.min([box.low for box in boxes], axis=0)
        high = np.max([box.high for box in boxes], axis=0)
        return spaces.Box(low, high, first.shape, cast("Any", first.dtype))
    return first


def _with_identity(space: Space, n_agents: int, group: str) -> Space:
    if isinstance(space, spaces.Dict):
        identity = spaces.Box(0, 1, (n_agents,), np.float32)
        return spaces.Dict({**space.spaces, AGENT_ID: identity})
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        dtype = cast("Any", space.dtype)
        low = np.concatenate([space.low, np.zeros(n_agents, dtype)])
        high = np.concatenate([space.high, np.ones(n_agents, dtype)])
        return spaces.Box(low, high, dtype=dtype)
    raise ValueError(
        f"agent_ids=True needs flat Box observations, to which it appends a one-hot "
        f"identity, or Dict observations, to which it adds {AGENT_ID!r}, but group "
        f"{group!r} observes {space}. Leave agent_ids out."
    )


def _info_shapes(
    keys: Sequence[str] | Mapping[str, tuple[int, ...]],
    first_reset: FirstReset,
    agents: Sequence[Any],
    name: str,
) -> dict[str, tuple[int, ...]]:
    if isinstance(keys, str):
        raise TypeError(
            f"info_keys must be a list of names, but is the string {keys!r}: pass "
            f"[{keys!r}]."
        )
    if unnamed := [key for key in keys if not isinstance(key, str)]:
        raise TypeError(f"info_keys must be names, but one of them is {unnamed[0]!r}.")
    if isinstance(keys, Mapping):
        return {key: tuple(shape) for key, shape in keys.items()}
    if not keys:
        return {}
    infos = {agent: info_of(first_reset.infos, agent, name) for agent in agents}
    return {key: _shape_of(key, infos) for key in keys}


def _shape_of(
    key: str, infos: Mapping[Any, Mapping[str, Any] | None]
) -> tuple[int, ...]:
    for agent, info in infos.items():
        if info and key in info:
            value = np.asarray(info[key])
            if value.dtype.kind not in "biuf":
                raise TypeError(
                    f"info_keys: {key!r} of agent {agent} must be a number or an array "
                    f"of numbers, but is {info[key]!r}."
                )
            return value.shape
    return ()


def _root(
    env: Zoo, name: str, options: PettingZooOptions, first_reset: FirstReset
) -> dict[str, Space]:
    if not options.return_state:
        return {}
    space: Space | None = getattr(env, "state_space", None)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        raise _no_array(name, f"its state_space is {space}")
    if space is not None:
        return {"state": space}
    try:
        returned = first_reset.state()
    except (NotImplementedError, AttributeError, TypeError) as error:
        raise ValueError(
            f"return_state=True needs an environment with state(), but that of {name} "
            f"raised {type(error).__name__}: {error}"
        ) from error
    try:
        state = np.asarray(returned)
    except ValueError as error:  # rows of different lengths
        raise _no_array(name, f"its state() returned {returned!r:.200}") from error
    if state.dtype.kind not in "biuf":
        raise _no_array(name, f"its state() returned {returned!r:.200}")
    return {"state": unbounded(state.shape, state.dtype)}


def _no_array(name: str, problem: str) -> TypeError:
    return TypeError(
        f"{name}: return_state=True needs a state that is a single array of numbers, "
        f"but {problem}. Make state_space and state() return one array (see "
        "gymnasium.spaces.flatten_space and flatten), or leave return_state out."
    )
