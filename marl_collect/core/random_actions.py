"""Uniformly random legal actions, computed from uniform noise.

The caller supplies the noise. A collector has one generator per environment and draws
the noise of a whole slot at once, so that actions do not depend on how environments are
distributed over workers. ``RandomPolicy`` draws from torch's global generator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.core.description import EnvDescription, Key, OneHotRows, leaf_spaces

Array = NDArray[Any]


@final
class RandomPolicy:
    """Takes uniformly random legal actions in every group of an environment.

    ``RandomPolicy()`` is sufficient in a collector, which knows its environments and
    draws in them whatever was given here.
    """

    def __init__(self, what: EnvDescription | Any = None) -> None:
        """Act in environments of this description.

        Args:
            what: an environment or its ``EnvDescription``; a Gymnasium space such as
                ``env.action_space``, nested like the keys; or a TorchRL spec. None lets
                the collector supply it.

        Raises:
            TypeError: for anything else.
        """
        self.description: EnvDescription | None = None
        self._space: spaces.Space[Any] | None = None
        self._spec: Any = None
        if isinstance(what, spaces.Space):
            self._space = what
        elif callable(getattr(what, "rand", None)):
            self._spec = what
        elif what is not None:
            description = getattr(what, "description", what)
            if not isinstance(description, EnvDescription):
                raise TypeError(
                    "RandomPolicy takes an environment, its description, a Gymnasium "
                    f"space or a TorchRL spec, but got {what!r:.200}."
                )
            self.description = description

    def __repr__(self) -> str:
        """Return what it acts for, if that is known."""
        what = self.description and self.description.name
        return f"RandomPolicy({what or self._space or self._spec or ''})".replace(
            "\n", " "
        )

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``(g, "action")`` of every group into ``tensordict``, ``[*B]``.

        Raises:
            RuntimeError: if no environment was given.
        """
        if self._spec is not None:
            return self._draw_from_spec(tensordict)
        if self._space is not None:
            return self._draw_from_space(tensordict, self._space)
        if self.description is None:
            raise RuntimeError(
                "RandomPolicy does not know the action spaces. Create it as "
                "RandomPolicy(env), or pass it to a collector."
            )
        batch = tuple(tensordict.batch_size)
        for sampler in samplers(self.description):
            noise = torch.rand(
                (*batch, *sampler.noise_shape), dtype=torch.float64, device="cpu"
            )
            mask = None
            if sampler.mask_key is not None:
                mask = tensordict.get(sampler.mask_key).cpu().numpy()
            action = torch.from_numpy(sampler.actions(noise.numpy(), mask))
            tensordict.set(sampler.key, action.to(tensordict.device or "cpu"))
        return tensordict

    def _draw_from_spec(self, tensordict: TensorDictBase) -> TensorDictBase:
        drawn = self._spec.rand(tuple(tensordict.batch_size))
        if isinstance(drawn, TensorDictBase):
            return tensordict.update(drawn)
        return tensordict.set("action", drawn)

    def _draw_from_space(
        self, tensordict: TensorDictBase, space: spaces.Space[Any]
    ) -> TensorDictBase:
        """Draw for all agents of a group together, from a space of all of them."""
        for key, leaf in leaf_spaces(space, ()):
            one_hot = isinstance(leaf, OneHotRows)
            inner = tuple(leaf.shape or ())
            shape = (*tensordict.batch_size, *(inner[:-1] if one_hot else inner))
            noise = torch.rand(shape, dtype=torch.float64, device="cpu").numpy()
            mask = tensordict.get((*key[:-1], "action_mask"), None)
            legal = None if mask is None else mask.cpu().numpy()
            if one_hot:
                action = _choose(noise, inner[-1], legal, one_hot=True)
            elif legal is not None and isinstance(leaf, spaces.MultiDiscrete):
                action = _choose(noise, legal.shape[-1], legal, one_hot=False)
            else:
                action = Sampler(key, leaf, 1, False, None).actions(noise)
            drawn = torch.as_tensor(action, device="cpu").to(tensordict.device or "cpu")
            tensordict.set(key or "action", drawn)
        return tensordict


def is_random(policy: Any) -> bool:
    """Return whether ``policy`` stands for random actions in a collector.

    These are None, ``RandomPolicy``, and TorchRL's class of that name. They draw in the
    spaces of the environments.
    """
    kind = type(policy)
    return (
        policy is None
        or isinstance(policy, RandomPolicy)
        or (kind.__name__ == "RandomPolicy" and kind.__module__.startswith("torchrl."))
    )


@final
@dataclass(frozen=True)
class Sampler:
    """Maps uniform noise to one array of actions of one group.

    Attributes:
        key: key of the actions.
        space: one agent's space of this array, as stored.
        n_agents: number of rows.
        one_hot: whether a Discrete action is stored one-hot.
        mask_key: key of the legal actions, if the group has an action mask.
    """

    key: Key
    space: spaces.Space[Any]
    n_agents: int
    one_hot: bool
    mask_key: Key | None

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the uniform noise of one frame."""
        shape = () if self.one_hot else tuple(self.space.shape or ())
        return (self.n_agents, *shape)

    @cached_property
    def _range(self) -> tuple[Array, Array] | None:
        """Lower bounds and spans of a Box of floats; None unless all are finite."""
        box = self.space
        if not isinstance(box, spaces.Box) or box.dtype.kind != "f":
            return None
        low = box.low.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            span = box.high.astype(np.float64) - low
        return (low, span) if np.isfinite(span).all() else None

    def actions(self, noise: Array, mask: Array | None = None) -> Array:
        """Return actions for ``noise``, float64 in ``[0, 1)``, ``[*B, *noise_shape]``.

        Args:
            noise: uniform.
            mask: legal actions, bool ``[*B, n_agents, n_actions]``.
        """
        space = self.space
        if isinstance(space, spaces.Discrete):
            return _choose(noise, int(space.n), mask, one_hot=self.one_hot)
        if isinstance(space, spaces.MultiDiscrete):
            return (noise * space.nvec).astype(np.int64)
        if isinstance(space, spaces.MultiBinary):
            return (noise < 0.5).astype(np.int64)
        if isinstance(space, spaces.Box):
            if self._range is None:
                return _in_box(noise, space)
            low, span = self._range
            return (low + noise * span).astype(space.dtype)
        raise TypeError(
            f"Random actions at {'/'.join(self.key)} cannot be sampled from the space "
            f"{space}: expected Box, Discrete, MultiDiscrete or MultiBinary."
        )


def samplers(description: EnvDescription) -> Iterator[Sampler]:
    """Yield a sampler for each array of the environment's actions."""
    for name, group in description.groups.items():
        for key, space in leaf_spaces(group.action, (name, "action")):
            mask = (name, "action_mask") if group.action_mask else None
            yield Sampler(key, space, group.n_agents, group.one_hot, mask)


def draw(sampler: Sampler, generators: list[np.random.Generator], frames: int) -> Array:
    """Draw the noise of ``frames`` frames, ``[K, frames, *noise_shape]``.

    Each of the K environments has its own generator and draws from it in the order of
    its frames, so the noise does not depend on the length of slots.
    """
    noise = np.empty((len(generators), frames, *sampler.noise_shape))
    for generator, row in zip(generators, noise, strict=True):
        generator.random(out=row)
    return noise


def _choose(noise: Array, n: int, mask: Array | None, *, one_hot: bool) -> Array:
    if mask is None:
        index = (noise * n).astype(np.int64)
    else:
        legal = mask.cumsum(-1)
        wanted = (noise * legal[..., -1]).astype(np.int64)
        index = (legal > wanted[..., None]).argmax(-1)
    return np.eye(n, dtype=np.int64)[index] if one_hot else index


def _in_box(noise: Array, box: spaces.Box) -> Array:
    """Draw like ``Box.sample``: uniform, exponential or normal, by the bounds."""
    low, high = box.bounded_below, box.bounded_above
    whole = box.dtype.kind in "biu"
    out = np.empty(noise.shape, dtype=np.float64)
    both, neither = low & high, ~low & ~high
    bottom, top = box.low[both].astype(np.float64), box.high[both].astype(np.float64)
    top += whole  # Rounded down below.
    with np.errstate(over="ignore", invalid="ignore"):
        span = top - bottom
        drawn = bottom + noise[..., both] * span
    # The span of bounds close to the largest float64 is infinite.
    wide = bottom * (1 - noise[..., both]) + top * noise[..., both]
    out[..., both] = np.where(np.isfinite(span), drawn, wide)
    tail = -np.log1p(-noise)
    out[..., low & ~high] = (box.low + tail)[..., low & ~high]
    out[..., ~low & high] = (box.high - tail)[..., ~low & high]
    if neither.any():
        normal = torch.special.ndtri(torch.from_numpy(noise).clamp(1e-12)).numpy()
        out[..., neither] = normal[..., neither]
    if whole:
        np.floor(out, out)
        limit = box.high.astype(np.float64)
        # No float64 is the largest int64 or uint64; the next one is too large.
        np.clip(
            out, box.low, np.where(limit < 2.0**63, limit, limit * (1 - 2**-53)), out
        )
    return out.astype(box.dtype)
