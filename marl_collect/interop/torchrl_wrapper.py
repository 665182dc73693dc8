"""Wraps a TorchRL environment. Imported by ``interop/torchrl.py`` only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv, Step, inner_value
from marl_collect.core.description import FLAGS, EnvDescription, Key, Row, leaves
from marl_collect.core.env import MultiAgentEnv, TensorDictEnv
from marl_collect.core.flags import Flags
from marl_collect.core.host_copies import PackedCopies
from marl_collect.interop.torchrl_places import Places, describe
from marl_collect.interop.torchrl_specs import REWARD_SUM


class _Arrays(dict[Key, NDArray[Any]]):
    """What an environment wrote, by TorchRL's keys."""

    def __missing__(self, key: Key) -> NDArray[Any]:
        raise KeyError(f"The environment did not write {key!r}, which is in its spec.")


class _Wrapper(TensorDictEnv):
    """What wrappers of one environment and of a batch have in common."""

    _env: EnvBase
    _groups: Mapping[str, Places]
    _now: TensorDictBase

    def _adopt(self, env: EnvBase, *, repeats: bool, seeded: bool) -> EnvDescription:
        """Wrap ``env``, and return its description.

        Args:
            env: the wrapped environment.
            repeats: whether seed and actions determine an episode.
            seeded: whether ``env.set_seed`` is called before episodes begin.
        """
        self._env = env
        description, self._groups = describe(env, repeats=repeats)
        self._has_root_flags = "done" in env.full_done_spec.keys()
        self._root_keys = [
            key
            for name, space in description.root.items()
            for key, _ in leaves(space, (name,))
        ]
        self._keys = [*self._root_keys, *_flag_keys(())]
        for name, group in self._groups.items():
            self._keys += [*group.observed.values(), group.reward]
            self._keys += _flag_keys(group.flags or ())
            if group.mask:
                self._keys.append((*group.prefix, "mask"))
            if description.groups[name].action_mask:
                self._keys.append((*group.prefix, "action_mask"))
            if group.summed:
                self._keys.append((*group.prefix, REWARD_SUM))
        self._copies = PackedCopies(env.device or torch.device("cpu"))
        self._seeded = seeded
        self._generator = torch.get_rng_state()
        return description

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped environment that ``EnvBase`` lacks."""
        inside = self.__dict__.get("_env")
        if inside is None or name.startswith("_") or hasattr(EnvBase, name):
            return super().__getattr__(name)  # type: ignore[misc]
        try:
            return getattr(inside, name)
        except AttributeError as error:
            raise AttributeError(
                f"Neither {type(self).__name__!r} nor the environment inside, "
                f"{type(inside).__name__!r}, has an attribute {name!r}"
            ) from error

    def close(self) -> None:
        """Close the wrapped environment."""
        if not self._closed:
            self._closed = True
            if not self._env.is_closed:
                self._env.close()

    def _begin(self, seed: int, due: TensorDictBase | None = None) -> None:
        """Reset the environment; ``due`` has the worlds that begin, None for all."""
        with self._random():
            torch.default_generator.manual_seed(seed)
            if self._seeded:
                self._env.set_seed(seed)
            self._now = self._env.reset(due).exclude(*self._env.reset_keys)

    def _advance(self, action_of: Callable[[str, Key], Any]) -> _Arrays:
        """Step with the action of each group and key; return what is "next"."""
        actions: dict[Key, torch.Tensor] = {}
        for name, group in self._groups.items():
            for ours, theirs in group.action.items():
                spec = self._env.full_action_spec[theirs]
                action = torch.tensor(action_of(name, ours), device="cpu")
                actions[theirs] = action.to(spec.dtype).reshape(spec.shape)
        there = self._copies.to_device(list(actions.values()))
        for key, action in zip(actions, there, strict=True):
            self._now.set(key, action.to(self._env.full_action_spec[key].device))
        with self._random():
            self._env.step(self._now)
        after = self._on_host(self._now.get("next"))
        self._now = self._env.step_mdp(self._now)
        return after

    def _on_host(self, tensordict: TensorDictBase) -> _Arrays:
        """Return what the engine needs as arrays, in one copy; see ``PackedCopies``."""
        values = {key: tensordict.get(key, None) for key in self._keys}
        tensors = {key: value for key, value in values.items() if value is not None}
        here = self._copies.to_host(list(tensors.values()))
        # Without a device of its own, an environment may have tensors anywhere.
        arrays = [tensor.cpu().numpy() for tensor in here]
        return _Arrays(zip(tensors, arrays, strict=True))

    @contextmanager
    def _random(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self._generator)
        try:
            yield
        finally:
            self._generator = torch.get_rng_state()
            torch.set_rng_state(before)


@final
class TorchRLWrapper(_Wrapper, MultiAgentEnv):
    """A single-agent or multi-agent environment of TorchRL, including its transforms.

    Groups are the keys that have actions, such as ``("agents", "action")``; their first
    dimension is the agents. An environment with ``"action"`` at the root has one group,
    ``agents``, with one agent, which has all observations. If rewards or flags exist at
    the root only, all agents get them. What ``RewardSum`` writes keeps its key. One-hot
    actions stay one-hot. An environment belongs to the process that steps it, so build
    the wrapper in a factory.

    An environment with the batch size ``[K]``, such as ``VmasEnv(num_envs=K)``, becomes
    a ``BatchedEnv`` of K worlds. It draws the random numbers of all worlds together, so
    its description has ``repeats=False``. It is seeded, with the seed of the first
    world that begins, whenever worlds begin. Equal seeds of a collector thus give equal
    data.

    The environment does not share random numbers with the policy: during resets and
    steps, torch's global generator has the environment's own state.

    Example:
        >>> factory = lambda: TorchRLWrapper(PendulumEnv())
    """

    def __new__(cls, env: EnvBase, *, repeats: bool = True) -> Any:
        """Return a wrapper of one environment, or the worlds of a batch."""
        if isinstance(env, EnvBase) and env.batch_size:
            return TorchRLWorlds(env, seeded=repeats)
        return super().__new__(cls)

    def __init__(self, env: EnvBase, *, repeats: bool = True) -> None:
        """Wrap ``env`` and own it.

        Args:
            env: a TorchRL environment with at most one batch dimension.
            repeats: whether seed and actions determine an episode. Pass False for
                environments that cannot be seeded; ``set_seed`` is then not called.

        Raises:
            TypeError: if ``env`` is not a TorchRL environment, or has unsupported
                keys or specs; names the key.
            ValueError: if ``env`` has several batch dimensions.
        """
        if not isinstance(env, EnvBase):
            raise TypeError(
                "TorchRLWrapper expects an environment of TorchRL, but got "
                f"{env!r} of type {type(env).__name__}."
            )
        self._description = self._adopt(env, repeats=repeats, seeded=repeats)

    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises."""
        return self._description

    def bind(self, row: Row) -> None:
        """Use ``row`` from now on: read actions from it, write everything else."""
        self._row = row
        self._flags = Flags(row, self._description)

    def reset_row(self, seed: int) -> None:
        """Begin the episode of ``seed``."""
        self._begin(seed)
        self._flags.clear()
        groups = self._description.groups.items()
        nobody = {name: np.zeros(g.n_agents, np.bool_) for name, g in groups}
        self._observe(self._on_host(self._now), nobody)

    def step_row(self) -> None:
        """Step with the row's actions."""
        dead = {
            name: self._row[name, "done"][:, 0].astype(np.bool_)
            for name in self._groups
        }
        after = self._advance(lambda _, key: self._row[key])
        self._revive(after, dead)
        self._end(after)
        for name, group in self._groups.items():
            rewards = self._row[name, "reward"]
            rewards[...] = after[group.reward].reshape(-1, 1)
            rewards[dead[name]] = 0
            if group.summed:
                total = after[*group.prefix, REWARD_SUM]
                self._row[name, REWARD_SUM][...] = total.reshape(-1, 1)
        self._observe(after, dead)

    def _observe(self, arrays: _Arrays, dead: Mapping[str, NDArray[np.bool_]]) -> None:
        for key in self._root_keys:
            self._row[key][...] = arrays[key]
        for name, group in self._groups.items():
            for ours, theirs in group.observed.items():
                memory = self._row[ours]
                memory[...] = arrays[theirs].reshape(memory.shape)
                memory[dead[name]] = 0
            acts = ~self._row[name, "done"][:, 0].astype(np.bool_)
            if group.mask:
                acts &= arrays[*group.prefix, "mask"].reshape(-1)
            self._row[name, "mask"][...] = acts
            if self._description.groups[name].action_mask:
                legal = self._row[name, "action_mask"]
                theirs = (*group.prefix, "action_mask")
                legal[...] = arrays[theirs].reshape(legal.shape)
                legal[~acts] = True

    def _revive(self, after: _Arrays, dead: Mapping[str, NDArray[np.bool_]]) -> None:
        """Remove agents from ``dead`` whose flags and masks say that they act again."""
        for name, group in self._groups.items():
            if not (group.flags and group.mask and dead[name].any()):
                continue
            acts = after[*group.prefix, "mask"].reshape(-1)
            for agent in np.flatnonzero(
                dead[name] & acts & ~_flags(after, group.flags)[0]
            ):
                self._flags.revive(name, int(agent))
                dead[name][agent] = False

    def _end(self, after: _Arrays) -> None:
        """Write the flags. Agents that are alive get those of the root, if any."""
        for name, group in self._groups.items():
            if group.flags is None:
                continue
            done, terminated, truncated = _flags(after, group.flags)
            for agent in np.flatnonzero(done):
                self._flags.end(
                    name,
                    int(agent),
                    terminated=bool(terminated[agent]),
                    truncated=bool(truncated[agent]),
                )
        over = cut = False
        if self._has_root_flags:
            _, over, cut = (bool(flag.any()) for flag in _flags(after, ()))
        self._flags.end_all(terminated=over, truncated=cut)


@final
class TorchRLWorlds(_Wrapper, BatchedEnv):
    """The worlds of a TorchRL environment with the batch size ``[K]``.

    ``TorchRLWrapper`` returns it. See there for groups and keys. An agent that is done
    stays done until its world begins again.
    """

    def __init__(self, env: EnvBase, *, seeded: bool) -> None:
        """Wrap ``env`` and own it.

        Args:
            env: a TorchRL environment with one batch dimension.
            seeded: whether ``env.set_seed`` is called when worlds begin.

        Raises:
            TypeError: if ``env`` has unsupported keys or specs; names the key.
            ValueError: if ``env`` has several batch dimensions.
        """
        if len(env.batch_size) != 1:
            raise ValueError(
                f"TorchRLWrapper expects at most one batch dimension, but "
                f"{type(env).__name__} has the batch size {list(env.batch_size)}. "
                "Build it with one dimension, such as num_envs=K."
            )
        description = self._adopt(env, repeats=False, seeded=seeded)
        super().__init__(description, env.batch_size[0])

    @override
    def begin(
        self, which: NDArray[np.bool_] | None, seeds: NDArray[np.int64]
    ) -> dict[Any, Any]:
        seed = int(seeds[0 if which is None else which.argmax()])
        due = None
        if which is not None:
            due = self._now
            flags: list[Any] = []
            masks: list[torch.Tensor] = []
            for key in self._env.reset_keys:
                prefix = key[:-1] if isinstance(key, tuple) else ()
                flags.append(self._env.full_done_spec[*prefix, "done"])
                mask = torch.from_numpy(which).reshape(-1, *[1] * (flags[-1].ndim - 1))
                masks.append(mask.expand(flags[-1].shape))
            there = self._copies.to_device(masks)
            for key, flag, mask in zip(self._env.reset_keys, flags, there, strict=True):
                due.set(key, mask.to(flag.device))
        self._begin(seed, due)
        return self._observations(self._on_host(self._now))

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        def action_of(name: str, key: Key) -> Any:
            group = self._description.groups[name]
            action = inner_value(actions[name], key[2:])
            return np.eye(group.n_actions)[action] if group.one_hot else action

        after = self._advance(action_of)
        rewards = {
            name: self._by_agent(name, after[group.reward])
            for name, group in self._groups.items()
        }
        return Step(self._observations(after), rewards, *self._ends(after))

    def _by_agent(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return ``[K, n]`` of values per agent, or of one for all agents."""
        shape = (self.worlds, self._description.groups[name].n_agents)
        return np.broadcast_to(values.reshape(self.worlds, -1), shape)

    def _ends(self, after: _Arrays) -> tuple[Any, Any]:
        """Return which agents terminated, and which were truncated, by group.

        Agents that are alive get the flags of the root, if any.
        """
        terminated: dict[str, Any] = {}
        truncated: dict[str, Any] = {}
        world: Any = _flags(after, ()) if self._has_root_flags else None
        for name, group in self._groups.items():
            flags = world if group.flags is None else _flags(after, group.flags)
            done, over, cut = (self._by_agent(name, flag) for flag in flags)
            if world is not None and group.flags is not None:
                _, ended, late = (self._by_agent(name, flag) for flag in world)
                over, cut = over | (~done & ended), cut | (~done & late)
            terminated[name], truncated[name] = over, cut
        return terminated, truncated

    def _observations(self, arrays: _Arrays) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key in self._root_keys:
            _nest(out, key, arrays[key])
        for name, group in self._groups.items():
            agents = self.worlds, self._description.groups[name].n_agents
            for ours, theirs in group.observed.items():
                value = arrays[theirs]
                if not group.prefix:
                    value = value[:, None]
                if ours[1] == "info":
                    out[ours] = value
                    continue
                _nest(out, (name, *ours[2:]), value)
            if group.mask:
                acts = arrays[*group.prefix, "mask"]
                out[name, "mask"] = acts.reshape(agents)
            if self._description.groups[name].action_mask:
                legal = arrays[*group.prefix, "action_mask"]
                out[name, "action_mask"] = legal.reshape(*agents, -1)
        return out


def _flag_keys(prefix: Key) -> list[Key]:
    return [(*prefix, flag) for flag in FLAGS]


def _flags(after: _Arrays, prefix: Key) -> tuple[Any, Any, Any]:
    """Return done, terminated and truncated; the last two are derived if missing."""
    # Some environments write flags as numbers.
    first, *others = _flag_keys(prefix)
    done = after[first].ravel() != 0
    terminated, truncated = (
        after[key].ravel() != 0 if key in after else None for key in others
    )
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    late = done & ~terminated
    return done, terminated, late if truncated is None else truncated | late


def _nest(tree: dict[Any, Any], path: Key, value: Any) -> None:
    """Write a value at ``path`` of nested mappings."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
