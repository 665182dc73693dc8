"""Wraps a TorchRL environment. Imported by ``interop/torchrl.py`` only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from marl_collect.core.description import FLAGS, EnvDescription, Key, Row, leaves
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.interop.torchrl_places import describe
from marl_collect.interop.torchrl_specs import REWARD_SUM


@final
class TorchRLWrapper(MultiAgentEnv):
    """A single-agent or multi-agent environment of TorchRL, including its transforms.

    Groups are the keys that have actions, such as ``("agents", "action")``; their first
    dimension is the agents. An environment with ``"action"`` at the root has one group,
    ``agents``, with one agent, which has all observations. If rewards or flags exist at
    the root only, all agents get them. What ``RewardSum`` writes keeps its key. One-hot
    actions stay one-hot. An environment belongs to the process that steps it, so build
    the wrapper in a factory.

    The environment does not share random numbers with the policy: during resets and
    steps, torch's global generator has the environment's own state.

    Example:
        >>> factory = lambda: TorchRLWrapper(PendulumEnv())
    """

    def __init__(self, env: EnvBase, *, repeats: bool = True) -> None:
        """Wrap ``env`` and own it.

        Args:
            env: a TorchRL environment with an empty batch size.
            repeats: whether seed and actions determine an episode. Pass False for
                environments that cannot be seeded; ``set_seed`` is then not called.

        Raises:
            TypeError: if ``env`` is not a TorchRL environment, or has unsupported
                keys or specs; names the key.
            ValueError: if ``env`` has batch dimensions.
        """
        if not isinstance(env, EnvBase):
            raise TypeError(
                "TorchRLWrapper expects an environment of TorchRL, but got "
                f"{env!r} of type {type(env).__name__}."
            )
        if env.batch_size:
            raise ValueError(
                f"TorchRLWrapper expects one environment, but {type(env).__name__} has "
                f"the batch size {list(env.batch_size)}. Wrap a single environment and "
                "batch the wrapper: ParallelEnv(n, lambda: TorchRLWrapper(...))."
            )
        self._env = env
        self._description, self._groups = describe(env, repeats=repeats)
        self._root_keys = [
            key
            for name, space in self._description.root.items()
            for key, _ in leaves(space, (name,))
        ]
        self._has_root_flags = "done" in env.full_done_spec.keys()
        self._generator = torch.get_rng_state()
        self._now: TensorDictBase = TensorDict()

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
        with self._random():
            torch.default_generator.manual_seed(seed)
            if self._description.repeats:
                self._env.set_seed(seed)
            self._now = self._env.reset()
        self._flags.clear()
        self._observe(self._now, self._nobody())

    def step_row(self) -> None:
        """Step with the row's actions."""
        for group in self._groups.values():
            for ours, theirs in group.action.items():
                spec = self._env.full_action_spec[theirs]
                action = torch.tensor(self._row[ours], dtype=spec.dtype)
                self._now.set(theirs, action.reshape(spec.shape).to(spec.device))
        dead = {
            name: self._row[name, "done"][:, 0].astype(np.bool_)
            for name in self._groups
        }
        with self._random():
            self._env.step(self._now)
        after = self._now.get("next")
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
        self._now = self._env.step_mdp(self._now)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped environment that ``EnvBase`` lacks."""
        inside = self.__dict__.get("_env")
        if inside is None or name.startswith("_") or hasattr(EnvBase, name):
            return super().__getattr__(name)
        try:
            return getattr(inside, name)
        except AttributeError as error:
            raise AttributeError(
                f"Neither {type(self).__name__!r} nor the environment inside, "
                f"{type(inside).__name__!r}, has an attribute {name!r}"
            ) from error

    def render(self) -> None:
        """Return None: TorchRL's environments have no common interface to render."""

    def close(self) -> None:
        """Close the wrapped environment."""
        if not self._closed:
            self._closed = True
            if not self._env.is_closed:
                self._env.close()

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
        """Write the flags; the root's own flags, if any, override the agents'."""
        own_flags = False
        for name, group in self._groups.items():
            if group.flags is None:
                continue
            own_flags = True
            done, terminated, truncated = _flags(after, group.flags)
            for agent in np.flatnonzero(done):
                self._flags.end(
                    name,
                    int(agent),
                    terminated=bool(terminated[agent]),
                    truncated=bool(truncated[agent]),
                )
        if not (self._has_root_flags and _flags(after, ())[0].any()):
            self._flags.settle()
            return
        _, terminated, truncated = (flag.any() for flag in _flags(after, ()))
        if own_flags:
            self._flags.truncate()
            self._row["terminated",][...] = terminated
            self._row["truncated",][...] = truncated
        else:
            self._flags.end_all(terminated=terminated, truncated=truncated)

    def _nobody(self) -> dict[str, NDArray[np.bool_]]:
        groups = self._description.groups.items()
        return {name: np.zeros(g.n_agents, np.bool_) for name, g in groups}

    @contextmanager
    def _random(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self._generator)
        try:
            yield
        finally:
            self._generator = torch.get_rng_state()
            torch.set_rng_state(before)


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
    if truncated is None:
        truncated = np.zeros_like(done) if terminated is None else done & ~terminated
    return done, done & ~truncated if terminated is None else terminated, truncated


def _array(tensordict: TensorDictBase, key: Key) -> Any:
    return tensordict.get(key).detach().cpu().numpy()
