"""What a TorchRL environment looks like to us, and which of its keys is which of ours.

Loaded by ``marl_collect.interop.torchrl`` only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from gymnasium import spaces
from torchrl.data import Composite, MultiOneHot, OneHot
from torchrl.envs import EnvBase

from marl_collect.core.description import EnvDescription, GroupDescription, Key, leaves
from marl_collect.interop.torchrl_specs import Space, space_of

SINGLE = "agents"
"""The group of an environment whose keys have none."""


@dataclass(frozen=True)
class Places:
    """Where TorchRL's environment keeps what is a group's.

    Attributes:
        prefix: of its keys; ``()`` for the environment of a single agent.
        observed: our key to TorchRL's, for all that is zeroed with a dead agent.
        action: our key to TorchRL's.
        reward: TorchRL's key.
        flags: prefix of the group's own done flags; None if it has none.
        mask: whether it says which agents act.
    """

    prefix: Key
    observed: Mapping[Key, Key]
    action: Mapping[Key, Key]
    reward: Key
    flags: Key | None
    mask: bool


def describe(
    env: EnvBase, *, repeats: bool
) -> tuple[EnvDescription, dict[str, Places]]:
    """Return the description, and where each group's data are.

    Raises:
        TypeError: for a spec without a space, naming the key.
    """
    actions = env.full_action_spec
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
        for name, spec in env.full_observation_spec.items():
            if name not in groups:
                root[name] = space_of(spec, (), name)
    unwrapped = type(getattr(env, "base_env", env)).__name__
    description = EnvDescription(unwrapped, groups, root, repeats=repeats)
    return description, places


def _group(env: EnvBase, name: str, prefix: Key) -> tuple[GroupDescription, Places]:
    actions = env.full_action_spec
    if prefix and not isinstance(actions[prefix], Composite):
        raise TypeError(
            f"The action {name!r} is at the root, but is not called 'action': expected "
            "('group', 'action') or 'action'. Rename it by RenameTransform."
        )
    found = actions[prefix] if prefix else actions
    if list(found.keys()) != ["action"]:
        raise TypeError(
            f"Group {name!r} has the actions {list(found.keys())}: expected one, "
            "called 'action'. Rename it by RenameTransform."
        )
    lead = tuple(found.shape) if prefix else ()
    if prefix and len(lead) != 1:
        raise TypeError(
            f"Group {name!r} has the batch size {list(lead)}: expected [n_agents]."
        )
    n = lead[0] if lead else 1
    action = found["action"]
    if isinstance(action, MultiOneHot):
        raise TypeError(
            f"{name}/action has the spec {action}: expected MultiCategorical for "
            "several choices. Most environments have an option for it."
        )
    if isinstance(action, OneHot):
        chosen = cast("Space", spaces.Discrete(int(action.space.n)))
    else:
        chosen = space_of(action, lead, f"{name}/action")
    inner = _part(env.full_observation_spec, prefix)
    acts = bool(prefix) and "mask" in inner and tuple(inner["mask"].shape) == lead
    legal = isinstance(chosen, spaces.Discrete) and "action_mask" in inner
    info = inner.get("info")
    infos = dict(info.items()) if isinstance(info, Composite) else {}
    apart = {"mask": acts, "action_mask": legal, "info": bool(infos)}
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
    )
    keys = [key for key, _ in leaves(observation, ())]
    where = {(name, "observation", *key): (*base, *key) for key in keys}
    where |= {(name, "info", k): (*prefix, "info", k) for k in group.info}
    parts = [key for key, _ in leaves(chosen, ())]
    return group, Places(
        prefix=prefix,
        observed=cast("Mapping[Key, Key]", where),
        action={(name, "action", *key): (*prefix, "action", *key) for key in parts},
        reward=_reward(env, name, prefix),
        flags=_flags(env, name, prefix),
        mask=acts,
    )


def _reward(env: EnvBase, name: str, prefix: Key) -> Key:
    """Return where a group's reward is: its own, the root's, or the only one.

    Raises:
        TypeError: if it is none of these.
    """
    found = _leaves(env.full_reward_spec)
    for key in ((*prefix, "reward"), ("reward",)):
        if key in found:
            return key
    if not prefix and len(found) == 1:
        return found[0]
    raise TypeError(
        f"The reward of group {name!r} is not clear: expected "
        f"{(*prefix, 'reward')!r} or 'reward', but found {found}. Rename it by "
        "RenameTransform."
    )


def _flags(env: EnvBase, name: str, prefix: Key) -> Key | None:
    """Return the prefix of a group's own flags, None if the root's are its own.

    Raises:
        TypeError: if there are none at all.
    """
    found = [key[:-1] for key in _leaves(env.full_done_spec) if key[-1] == "done"]
    if prefix and prefix in found:
        return prefix
    if () in found:
        return None
    if not prefix and len(found) == 1:
        return found[0]
    raise TypeError(
        f"The flags of group {name!r} are not clear: expected {(*prefix, 'done')!r} or "
        f"'done', but found {[(*each, 'done') for each in found]}. Rename them by "
        "RenameTransform."
    )


def _leaves(spec: Composite) -> list[Key]:
    keys = spec.keys(include_nested=True, leaves_only=True)
    return [key if isinstance(key, tuple) else (key,) for key in keys]


def _part(spec: Composite, prefix: Key) -> dict[str, Any]:
    if not prefix:
        return dict(spec.items())
    return dict(spec[prefix].items()) if prefix[0] in spec.keys() else {}


def _agents(env: EnvBase, group: str, n: int) -> tuple[str, ...]:
    known = getattr(env, "group_map", None) or {}
    names = tuple(known.get(group, ()))
    return names if len(names) == n else tuple(f"{group}_{i}" for i in range(n))
