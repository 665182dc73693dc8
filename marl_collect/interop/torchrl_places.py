"""Describes a TorchRL environment, and maps our keys to its keys.

Imported by ``marl_collect.interop.torchrl`` only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from gymnasium import spaces
from torchrl.data import Composite, MultiOneHot, OneHot
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from marl_collect.core.description import EnvDescription, GroupDescription, Key, leaves
from marl_collect.errors import counted
from marl_collect.interop.torchrl_specs import REWARD_SUM, Space, space_of

SINGLE = "agents"
"""Name of the group of an environment without groups."""


@dataclass(frozen=True)
class Places:
    """The keys of a group in a TorchRL environment.

    Attributes:
        prefix: prefix of the group's keys; ``()`` in a single-agent environment.
        observed: TorchRL's keys by ours, for entries that are zero for dead agents.
        action: TorchRL's keys of the action, by ours.
        reward: TorchRL's key of the reward.
        flags: prefix of the group's own done flags; None if it has none.
        mask: whether the group has a mask of acting agents.
        summed: whether ``RewardSum`` writes the group's ``episode_reward``.
    """

    prefix: Key
    observed: Mapping[Key, Key]
    action: Mapping[Key, Key]
    reward: Key
    flags: Key | None
    mask: bool
    summed: bool


def describe(
    env: EnvBase, *, repeats: bool
) -> tuple[EnvDescription, dict[str, Places]]:
    """Return the description of an environment and the keys of each group.

    Batch dimensions of the environment are left out.

    Raises:
        TypeError: if keys or specs are not supported; names the key.
    """
    actions = env.full_action_spec_unbatched
    if "action" in actions.keys() and not isinstance(actions["action"], Composite):
        prefixes: dict[str, Key] = {SINGLE: ()}
    else:
        prefixes = {name: (name,) for name in actions.keys()}
    groups: dict[str, GroupDescription] = {}
    places: dict[str, Places] = {}
    for name, prefix in prefixes.items():
        groups[name], places[name] = _group(env, name, prefix)
    root: dict[str, Space] = {}
    if SINGLE not in places or places[SINGLE].prefix:
        for name, spec in env.full_observation_spec_unbatched.items():
            if name not in groups:
                root[name] = space_of(spec, (), name)
    name = type(_inside(env)).__name__
    description = EnvDescription(name, groups, root, repeats=repeats)
    return description, places


def _group(env: EnvBase, name: str, prefix: Key) -> tuple[GroupDescription, Places]:
    actions = env.full_action_spec_unbatched
    if prefix and not isinstance(actions[prefix], Composite):
        raise TypeError(
            f"The environment has the action {name!r} at the root: expected 'action', "
            "or ('group', 'action'). Rename it with RenameTransform."
        )
    taken = actions[prefix] if prefix else actions
    if list(taken.keys()) != ["action"]:
        raise TypeError(
            f"Group {name!r} has the actions {list(taken.keys())}: expected one, named "
            "'action'. Rename it with RenameTransform."
        )
    lead = tuple(taken.shape) if prefix else ()
    if prefix and len(lead) != 1:
        raise TypeError(
            f"Group {name!r} has the batch size {list(lead)}: expected [n_agents]."
        )
    n = lead[0] if lead else 1
    action = taken["action"]
    if isinstance(action, MultiOneHot):
        raise TypeError(
            f"{name}/action has the spec {action}: expected MultiCategorical. Most "
            "environments have an option for it."
        )
    if isinstance(action, OneHot):
        chosen = cast("Space", spaces.Discrete(int(action.space.n)))
    else:
        chosen = space_of(action, lead, f"{name}/action", is_action=True)
    inner = _part(env.full_observation_spec_unbatched, prefix)
    acts = bool(prefix) and "mask" in inner and tuple(inner["mask"].shape) == lead
    legal = isinstance(chosen, spaces.Discrete) and "action_mask" in inner
    info = inner.get("info")
    infos = dict(info.items()) if isinstance(info, Composite) else {}
    summed = inner.get(REWARD_SUM)
    sums = summed is not None and tuple(summed.shape) == (*lead, 1)
    apart = {
        "mask": acts,
        "action_mask": legal,
        "info": bool(infos),
        REWARD_SUM: sums,
    }
    observed = {k: v for k, v in inner.items() if not apart.get(k, False)}
    base = prefix
    seen: Any = Composite(observed, shape=lead)
    if len(observed) == 1:
        ((key, seen),) = observed.items()
        base = (*prefix, key)
    observation = space_of(seen, lead, f"{name}/observation")
    group = GroupDescription(
        agents=_agents(env, name, n),
        observation=observation,
        action=chosen,
        categorical_actions=not isinstance(action, OneHot),
        action_mask=legal,
        info={key: tuple(spec.shape[len(lead) :]) for key, spec in infos.items()},
        episode_reward=sums,
    )
    rewards, flags = env.full_reward_spec_unbatched, env.full_done_spec_unbatched
    reward = _key_of(rewards, "reward", _leaves(rewards), name, prefix, n)
    dones = [key for key in _leaves(flags) if key[-1] == "done"]
    done = _key_of(flags, "done", dones, name, prefix, n)
    where = {
        (name, "observation", *key): (*base, *key) for key, _ in leaves(observation, ())
    }
    where |= {(name, "info", k): (*prefix, "info", k) for k in group.info}
    parts = [key for key, _ in leaves(chosen, ())]
    return group, Places(
        prefix=prefix,
        observed=cast("Mapping[Key, Key]", where),
        action={(name, "action", *key): (*prefix, "action", *key) for key in parts},
        reward=reward,
        flags=done[:-1] or None,
        mask=acts,
        summed=sums,
    )


def _key_of(
    spec: Composite, leaf: str, keys: list[Key], name: str, prefix: Key, n: int
) -> Key:
    """Return the key of a group's reward or flag: its own, the root's, or the only one.

    Args:
        spec: of all rewards, or of all flags.
        leaf: usual name of the entry.
        keys: of the entries that may be meant.
        name: of the group.
        prefix: of the group's keys.
        n: number of agents.

    Raises:
        TypeError: if there is none of these, or neither one value per agent nor one
            for all of them.
    """
    choices = [key for key in ((*prefix, leaf), (leaf,)) if key in keys]
    if not prefix and len(keys) == 1:
        choices += keys
    if not choices:
        raise TypeError(
            f"The {leaf} of group {name!r} is ambiguous: expected {(*prefix, leaf)!r} "
            f"or {leaf!r}, but found {keys}. Rename it with RenameTransform."
        )
    shape = spec[choices[0]].shape
    if shape.numel() not in (1, n):
        raise TypeError(
            f"{choices[0]!r} of group {name!r} has the shape {list(shape)}, but the "
            f"group has {counted(n, 'agent')}, as many as actions: expected one "
            "value per agent, or one for all. Give every agent an action at "
            "('group', 'action'), or reduce the values with a transform."
        )
    return choices[0]


def _inside(env: EnvBase) -> EnvBase:
    return env.base_env if isinstance(env, TransformedEnv) else env


def _leaves(spec: Composite) -> list[Key]:
    keys = spec.keys(include_nested=True, leaves_only=True)
    return [key if isinstance(key, tuple) else (key,) for key in keys]


def _part(spec: Composite, prefix: Key) -> dict[str, Any]:
    if not prefix:
        return dict(spec.items())
    return dict(spec[prefix].items()) if prefix[0] in spec.keys() else {}


def _agents(env: EnvBase, group: str, n: int) -> tuple[str, ...]:
    # SerialEnv and ParallelEnv would ask environments that they have not built yet.
    batched = isinstance(_inside(env), BatchedEnvBase)
    known = {} if batched else getattr(env, "group_map", None) or {}
    names = tuple(known.get(group, ()))
    return names if len(names) == n else tuple(f"{group}_{i}" for i in range(n))
