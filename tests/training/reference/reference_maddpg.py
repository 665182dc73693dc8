"""MADDPG and IDDPG from their definitions: each agent's action changes by itself."""

from collections.abc import Mapping
from typing import Any

import reference_ppo as ppo
import torch
from reference_networks import LAST, Settings, Weights
from torch import Tensor

LOW, HIGH = -2.0, 1.0
"""Bounds of the actions of ``DrawnEnv``."""


def means(weights: Weights, frames: Any, settings: Settings) -> dict[str, Tensor]:
    """Return what the policies say before squashing, ``[F, n, 2]`` by group."""
    return {
        name: ppo.policy_outputs(weights, index, name, frames, settings)[..., :2]
        for index, name in enumerate(settings.groups)
    }


def squash(mean: Tensor) -> Tensor:
    return LOW + (HIGH - LOW) * (1 + torch.tanh(mean)) / 2


def values(
    weights: Weights, frames: Any, actions: Mapping[str, Tensor], settings: Settings
) -> dict[str, Tensor]:
    """Return the values ``[F, n]`` of all agents for the actions ``[F, n, 2]``."""
    frames = frames.clone(recurse=False)
    for name, action in actions.items():
        frames[name, "observation", LAST] = action
    return ppo.values(weights, frames, settings)


def losses(
    online: Mapping[str, Weights],
    target: Mapping[str, Weights],
    batch: Any,
    settings: Settings,
    drawn: list[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """Return the critic's loss and the policy's, of frames of a batch.

    Args:
        online: weights of ``policy`` and ``critic``.
        target: those of the target networks.
        batch: ``[B, T]`` of a collector.
        settings: of the learner.
        drawn: row and frame of each frame of the minibatch.
    """
    rows, times = map(list, zip(*drawn, strict=True))
    frames = batch[rows, times]
    acts = {name: frames[name, "mask"] for name in settings.groups}
    follows, ended = {}, {}
    for name in settings.groups:
        after = frames["next", name]
        done, fell = after["done"][..., 0], after["terminated"][..., 0]
        follows[name] = torch.where(done, acts[name] & ~fell, after["mask"])
        ended[name] = fell if settings.bootstrap_limits else done
    taken = {
        name: torch.where(m[..., None], frames[name, "action"].double(), 0.0)
        for name, m in acts.items()
    }
    with torch.no_grad():
        next_actions = {
            name: torch.where(follows[name][..., None], squash(mean), 0.0)
            for name, mean in means(target["policy"], frames["next"], settings).items()
        }
        following = values(target["critic"], frames["next"], next_actions, settings)
    value = values(online["critic"], frames, taken, settings)
    reward = ppo.rewards(batch, settings)
    critic_loss = policy_loss = torch.zeros(()).double()
    fixed = {name: weight.detach() for name, weight in online["critic"].items()}
    for name, mean in means(online["policy"], frames, settings).items():
        later = torch.where(follows[name] & ~ended[name], following[name], 0.0)
        goal = reward[name][rows, times] + settings.gamma * later
        known = acts[name] & (follows[name] | ended[name])
        if known.any():
            critic_loss = critic_loss + ((value[name] - goal) ** 2)[known].mean()
        terms = []
        for i in range(settings.groups[name]):
            changed = taken[name].clone()
            changed[:, i] = squash(mean[:, i])
            own = values(fixed, frames, {**taken, name: changed}, settings)[name]
            penalty = settings.action_penalty * (mean[:, i] ** 2).mean(-1)
            terms.append((penalty - own[:, i])[acts[name][:, i]])
        if len(torch.cat(terms)):
            policy_loss = policy_loss + torch.cat(terms).mean()
    return critic_loss, policy_loss
