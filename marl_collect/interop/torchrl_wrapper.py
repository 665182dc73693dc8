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
from marl_collect.interop.torchrl_places import Places, describe
from marl_collect.interop.torchrl_specs import REWARD_SUM


class _Wrapper(TensorDictEnv):
    """What wrappers of one environment and of a batch have in common."""

    _env: EnvBase
    _groups: Mapping[str, Places]
    _now: TensorDictBase

    def _own(self, env: EnvBase, *, repeats: bool, seeded: bool) -> EnvDescription:
        """Own ``env``, and return its description.

        Args:
            env: the wrapped environment.
            repeats: whether seed and actions determine an episode.
            seeded: whether ``env.set_seed`` is called before episodes begin.
        """
        self._env = env
        description, self._groups = describe(env, repeats=repeats)
        self._has_root_flags = "done" in env.full_done_spec.keys()
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

    def _advance(self, action_of: Callable[[str, Key], Any]) -> TensorDictBase:
        """Step with the action of each group and key; return what is "next"."""
        for name, group in self._groups.items():
            for ours, theirs in group.action.items():
                spec = self._env.full_action_spec[theirs]
                action = torch.tensor(action_of(name, ours), device="cpu")
                action = action.to(spec.device, spec.dtype).reshape(spec.shape)
                self._now.set(theirs, action)
        with self._random():
            self._env.step(self._now)
        after = self._now.get("next")
        self._now = self._env.step_mdp(self._now)
        return after

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
        self._description = self._own(env, repeats=repeats, seeded=repeats)
        self._root_keys = [
            key
            for name, space in self._description.root.items()
            for key, _ in leaves(space, (name,))
        ]

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
        self._observe(self._now, nobody)

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
            rewards[...] = _array(after, group.reward).reshape(-1, 1)
            rewards[dead[name]] = 0
            if group.summed:
                total = _array(after, (*group.prefix, REWARD_SUM))
                self._row[name, REWARD_SUM][...] = total.reshape(-1, 1)
        self._observe(after, dead)

    def _observe(
        self, tensordict: TensorDictBase, dead: Mapping[str, NDArray[np.bool_]]
    ) -> None:
        for key in self._root_keys:
            self._row[key][...] = _array(tensordict, key)
        for name, group in self._groups.items():
            for ours, theirs in group.observed.items():
                memory = self._row[ours]
                memory[...] = _array(tensordict, theirs).reshape(memory.shape)
                memory[dead[name]] = 0
            acts = ~self._row[name, "done"][:, 0].astype(np.bool_)
            if group.mask:
                acts &= _array(tensordict, (*group.prefix, "mask")).reshape(-1)
            self._row[name, "mask"][...] = acts
            if self._description.groups[name].action_mask:
                legal = self._row[name, "action_mask"]
                theirs = (*group.prefix, "action_mask")
                legal[...] = _array(tensordict, theirs).reshape(legal.shape)
                legal[~acts] = True

    def _revive(
        self, after: TensorDictBase, dead: Mapping[str, NDArray[np.bool_]]
    ) -> None:
        """Remove agents from ``dead`` whose flags and masks say that they act again."""
        for name, group in self._groups.items():
            if not (group.flags and group.mask and dead[name].any()):
                continue
            acts = _array(after, (*group.prefix, "mask")).reshape(-1)
            for agent in np.flatnonzero(
                dead[name] & acts & ~_flags(after, group.flags)[0]
            ):
                self._flags.revive(name, int(agent))
                dead[name][agent] = False

    def _end(self, after: TensorDictBase) -> None:
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
        description = self._own(env, repeats=False, seeded=seeded)
        super().__init__(description, env.batch_size[0])

    @override
    def begin(
        self, which: NDArray[np.bool_] | None, seeds: NDArray[np.int64]
    ) -> dict[Any, Any]:
        seed = int(seeds[0 if which is None else which.argmax()])
        due = None
        if which is not None:
            due = self._now
            for key in self._env.reset_keys:
                prefix = key[:-1] if isinstance(key, tuple) else ()
                flag = self._env.full_done_spec[*prefix, "done"]
                chosen = torch.from_numpy(which).reshape(-1, *[1] * (flag.ndim - 1))
                due.set(key, chosen.expand(flag.shape).to(flag.device))
        self._begin(seed, due)
        return self._observations(self._now)

    @override
    def advance(self, actions: Mapping[str, Any]) -> Step:
        def action_of(name: str, key: Key) -> Any:
            group = self._description.groups[name]
            action = inner_value(actions[name], key[2:])
            return np.eye(group.n_actions)[action] if group.one_hot else action

        after = self._advance(action_of)
        rewards = {
            name: self._by_agent(name, _array(after, group.reward))
            for name, group in self._groups.items()
        }
        return Step(self._observations(after), rewards, *self._ends(after))

    def _by_agent(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return ``[K, n]`` of values per agent, or of one for all agents."""
        shape = (self.worlds, self._description.groups[name].n_agents)
        return np.broadcast_to(values.reshape(self.worlds, -1), shape)

    def _ends(self, after: TensorDictBase) -> tuple[Any, Any]:
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

    def _observations(self, tensordict: TensorDictBase) -> dict[Any, Any]:
        out: dict[Any, Any] = {
            name: tensordict.get(name).detach().cpu() for name in self._description.root
        }
        for name, group in self._groups.items():
            agents = self.worlds, self._description.groups[name].n_agents
            for ours, theirs in group.observed.items():
                value = _array(tensordict, theirs)
                if not group.prefix:
                    value = value[:, None]
                if ours[1] == "info":
                    out[ours] = value
                    continue
                node, path = out, (name, *ours[2:])
                for part in path[:-1]:
                    node = node.setdefault(part, {})
                node[path[-1]] = value
            if group.mask:
                acts = _array(tensordict, (*group.prefix, "mask"))
                out[name, "mask"] = acts.reshape(agents)
            if self._description.groups[name].action_mask:
                legal = _array(tensordict, (*group.prefix, "action_mask"))
                out[name, "action_mask"] = legal.reshape(*agents, -1)
        return out


def _flags(after: TensorDictBase, prefix: Key) -> tuple[Any, Any, Any]:
    """Return done, terminated and truncated; the last two are derived if missing."""
    keys = [(*prefix, flag) for flag in FLAGS]
    # Some environments write flags as numbers.
    done, terminated, truncated = (
        None if after.get(key, None) is None else _array(after, key).ravel() != 0
        for key in keys
    )
    if done is None:
        raise KeyError(
            f"The environment did not write {keys[0]!r}, which is in its spec."
        )
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    late = done & ~terminated
    return done, terminated, late if truncated is None else truncated | late


def _array(tensordict: TensorDictBase, key: Key) -> Any:
    return tensordict.get(key).detach().cpu().numpy()
