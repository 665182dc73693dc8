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
        chosen = space_of(action, lead, f"{name}/action")
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
    keys = [key for key, _ in leaves(observation, ())]
    where = {(name, "observation", *key): (*base, *key) for key in keys}
    where |= {(name, "info", k): (*prefix, "info", k) for k in group.info}
    parts = [key for key, _ in leaves(chosen, ())]
    return group, Places(
        prefix=prefix,
        observed=cast("Mapping[Key, Key]", where),
        action={(name, "action", *key): (*prefix, "action", *key) for key in parts},
        reward=_reward(env, name, prefix, n),
        flags=_flags(env, name, prefix, n),
        mask=acts,
        summed=sums,
    )


def _reward(env: EnvBase, name: str, prefix: Key, n: int) -> Key:
    """Return the key of a group's reward: its own, the root's, or the only one.

    Raises:
        TypeError: if none of these exists, or not with a value per agent.
    """
    rewards = _leaves(env.full_reward_spec_unbatched)
    choices = [key for key in ((*prefix, "reward"), ("reward",)) if key in rewards]
    if not prefix and len(rewards) == 1:
        choices += rewards
    if choices:
        _check_rows(env.full_reward_spec_unbatched, choices[0], name, n)
        return choices[0]
    raise TypeError(
        f"The reward of group {name!r} is ambiguous: expected "
        f"{(*prefix, 'reward')!r} or 'reward', but found {rewards}. Rename it with "
        "RenameTransform."
    )


def _flags(env: EnvBase, name: str, prefix: Key, n: int) -> Key | None:
    """Return the prefix of a group's own flags, or None if it uses the root's.

    Raises:
        TypeError: if neither exists, or not with a value per agent.
    """
    spec = env.full_done_spec_unbatched
    prefixes = [key[:-1] for key in _leaves(spec) if key[-1] == "done"]
    choices = [key for key in (prefix, ()) if key in prefixes]
    if not prefix and len(prefixes) == 1:
        choices += prefixes
    if choices:
        _check_rows(spec, (*choices[0], "done"), name, n)
        return choices[0] or None
    raise TypeError(
        f"The flags of group {name!r} are ambiguous: expected {(*prefix, 'done')!r} or "
        f"'done', but found {[(*path, 'done') for path in prefixes]}. Rename them with "
        "RenameTransform."
    )


def _check_rows(specs: Composite, key: Key, group: str, n: int) -> None:
    """Check that there is one value per agent, or one for all of them.

    Raises:
        TypeError: if not.
    """
    shape = specs[key].shape
    if shape.numel() in (1, n):
        return
    raise TypeError(
        f"{key!r} of group {group!r} has the shape {list(shape)}, but the group has "
        f"{n} agent{'s' * (n > 1)}, as many as actions: expected one "
        "value per agent, or one for all. Give every agent an action at "
        "('group', 'action'), or reduce the values with a transform."
    )


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
