"""Converts environments: ours for TorchRL, and TorchRL's for our collectors.

Needs the extra ``torchrl``. Batches need no conversion: TorchRL's losses, value
estimators and replay buffers accept them.
"""

from typing import Any, final

import numpy as np
from tensordict import TensorDictBase

from marl_collect.errors import imports_of

with imports_of("torchrl", "marl_collect.interop.torchrl"):
    from torchrl.envs import EnvBase

from marl_collect.core.env import TensorDictEnv
from marl_collect.core.torch_defaults import float32_on
from marl_collect.interop import torchrl_specs as specs
from marl_collect.interop.torchrl_wrapper import TorchRLWrapper

__all__ = ["TorchRLWrapper", "to_torchrl"]


def to_torchrl(env: TensorDictEnv) -> "_OurEnv":
    """Return a TorchRL environment that owns ``env``.

    Args:
        env: an environment, or a batch of them (``SerialEnv``, ``ParallelEnv``).

    Returns:
        An ``EnvBase`` with the same keys and the same batch size. Groups are
        TensorDicts ``[*batch_size, n_agents]``. Action specs sample actions that the
        action masks allow. Partial resets and steps of a batch are supported.

    Raises:
        TypeError: if ``env`` is not one of our environments.

    Example:
        >>> env = to_torchrl(PettingZooEnv("multiwalker_v9"))
        >>> check_env_specs(env)
    """
    if not isinstance(env, TensorDictEnv):
        hint = " Call the factory first." if callable(env) else ""
        raise TypeError(
            "to_torchrl expects an environment, a SerialEnv or a ParallelEnv of "
            f"marl_collect, but got {env!r} of type {type(env).__name__}.{hint}"
        )
    return _OurEnv(env)


@final
class _OurEnv(EnvBase):
    """One of our environments as TorchRL's ``EnvBase``."""

    @float32_on("cpu")
    def __init__(self, env: TensorDictEnv) -> None:
        description, batch = env.description, env.batch_size
        super().__init__(batch_size=batch)
        self._ours = env
        self.group_map = description.group_map
        self.observation_spec = specs.observation_spec(description, batch)
        self.action_spec = specs.action_spec(description, batch)
        self.reward_spec = specs.reward_spec(description, batch)
        self.done_spec = specs.done_spec(description, batch)
        groups = description.groups.items()
        self._masked = [name for name, group in groups if group.action_mask]
        self._summed = [name for name, group in groups if group.episode_reward]

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        **_: Any,
    ) -> TensorDictBase:
        out = self._ours.reset(tensordict)
        for name in self._summed:
            group = out.get(name)
            group.set(specs.REWARD_SUM, group.get("done").float().zero_())
        self._mask(out)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        wanted = [*self.action_keys, "_step"]
        out = self._ours.step(tensordict.select(*wanted, strict=False)).get("next")
        self._mask(out)
        return out

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._ours.set_seed(seed)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of our environment that ``EnvBase`` does not have."""
        ours = self.__dict__.get("_ours")
        if ours is None or name.startswith("_"):
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(ours, name)

    def render(self, mode: str = "rgb_array") -> Any:
        """Return pictures, uint8 ``[*batch_size, height, width, 3]``.

        Raises:
            ValueError: if the mode is another one, or the environment renders nothing.
        """
        if mode != "rgb_array":
            raise ValueError(f"mode must be 'rgb_array', but is {mode!r}.")
        ours: Any = self._ours
        picture = ours.render()
        pictures = picture if self.batch_size else [picture]
        if any(image is None for image in pictures):
            raise ValueError(
                "The environment renders no pictures. Build it with rendering, for "
                'example PettingZooEnv(..., render_mode="rgb_array").'
            )
        return np.stack(pictures) if self.batch_size else picture

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close this environment and the one that it owns."""
        super().close(raise_if_closed=raise_if_closed)
        self._ours.close()

    def _mask(self, tensordict: TensorDictBase) -> None:
        """Make the action specs sample legal actions only."""
        for name in self._masked:
            mask = tensordict.get((name, "action_mask"))
            self.full_action_spec[name, "action"].update_mask(mask.clone())
