"""MADDPG and IDDPG from their definitions: each agent's action changes by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import reference_ppo as ppo
import torch
from reference_networks import LAST, Weights
from torch import Tensor

LOW, HIGH = -2.0, 1.0
"""Bounds of the actions of ``DrawnEnv``."""


@dataclass(frozen=True)
class Settings:
    """Of a learner, as its options name them."""

    groups: Mapping[str, int]
    central: bool
    centralised: bool
    ids: bool
    attends: bool
    team: bool
    gamma: float
    scale: float
    standardised: bool
    bootstraps: bool
    penalty: float
    recurrent: bool = False
    remembers: bool = False


def means(weights: Weights, frames: Any, settings: Any) -> dict[str, Tensor]:
    """Return what the policies say before squashing, ``[F, n, 2]`` by group."""
    return {
        name: ppo.policy_outputs(weights, index, name, frames, settings)[..., :2]
        for index, name in enumerate(settings.groups)
    }


def squash(mean: Tensor) -> Tensor:
    return LOW + (HIGH - LOW) * (1 + torch.tanh(mean)) / 2


def values(
    weights: Weights, frames: Any, actions: Mapping[str, Tensor], settings: Any
) -> dict[str, Tensor]:
    """Return the values ``[F, n]`` of all agents for the actions ``[F, n, 2]``."""
    frames = frames.clone(recurse=False)
    for name, action in actions.items():
        frames[name, "observation", LAST] = action
    return ppo.values(weights, frames, settings)


def rewards(batch: Any, settings: Settings) -> dict[str, Tensor]:
    """Return what agents learn from, ``[B, T, n]``, with the moments of the batch."""
    out = {g: batch["next", g, "reward"][..., 0].double() for g in settings.groups}
    if settings.team:
        mean = torch.cat(list(out.values()), -1).mean(-1, keepdim=True)
        out = {g: mean.repeat(1, 1, n) for g, n in settings.groups.items()}
    for name, reward in out.items() if settings.standardised else ():
        every = reward[~batch[name, "done"][..., 0]]
        every = reward[..., 0] if settings.team else every
        out[name] = (reward - every.mean()) / every.std(correction=0)
    return {name: settings.scale * reward for name, reward in out.items()}


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
        ended[name] = fell if settings.bootstraps else done
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
    reward = rewards(batch, settings)
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
            penalty = settings.penalty * (mean[:, i] ** 2).mean(-1)
            terms.append((penalty - own[:, i])[acts[name][:, i]])
        if len(torch.cat(terms)):
            policy_loss = policy_loss + torch.cat(terms).mean()
    return critic_loss, policy_loss
