"""IQL, VDN, QMIX, MADDPG and IDDPG from their definitions, one agent at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import reference_networks as networks
import reference_ppo as ppo
import torch
import torch.nn.functional as F
from reference_networks import LAST, Settings, Weights
from torch import Tensor

Frames = tuple[int, int, int]
"""An environment, its first frame, and the frame behind its last: one sequence."""


def action_values(weights: Weights, group: Any, settings: Settings) -> Tensor:
    """Return the values of all actions ``[T, n, actions]`` in a sequence ``[T]``.

    A recurrent network remembers the frames from the first one on.
    """
    hidden = networks.hidden_layers(weights)
    if settings.attends and settings.centralised:
        x = networks.encode(group["observation"], weights)
        return networks.attend(x, group["terminated"], hidden, ids=settings.agent_ids)
    x = networks.encode(group["observation"], weights, settings.agent_ids)
    x = networks.everybody(x) if settings.centralised else x
    if not settings.recurrent:
        return networks.perceptron(x, hidden)
    x = networks.perceptron(x, hidden, activate_last=True).unsqueeze(0)
    zeros = torch.zeros(1, x.shape[2], networks.hidden_size(weights)).double()
    nowhere = torch.zeros(x.shape[:2], dtype=torch.bool)
    states = networks.unroll(x, zeros, nowhere, weights)[0]
    return networks.perceptron(states, networks.layers(weights, "decoder"))


def mix(weights: Weights, values: Tensor, group: Any, settings: Settings) -> Tensor:
    """Return the values to learn ``[T, k]`` from those of the agents ``[T, n]``."""
    if settings.algorithm == "iql":
        return values
    if settings.algorithm == "vdn":
        return values.sum(-1, keepdim=True)
    encoder = {k: w for k, w in weights.items() if "encoder" in k}
    # The state is what all agents see, not what they did.
    observed = group["observation"]
    seen = {k: observed[k] for k in observed.keys() if k != networks.LAST}
    x = networks.encode(seen, encoder)
    last = networks.layers(encoder, "mlp")
    if last:  # After convolutions.
        x = F.relu(networks.linear(x, *last[0]))
    state = x.flatten(-2)
    if settings.mixing_norm:
        state = state - state.mean(-1, keepdim=True)
        state = state / torch.sqrt((state**2).mean(-1, keepdim=True) + 1e-5)

    def hyper(name: str) -> Tensor:
        out = state
        for index, (weight, bias) in enumerate(networks.layers(weights, f".{name}.")):
            out = (F.relu(out) if index else out) @ weight.T + bias
        return out

    first = hyper("hyper_w_1").abs().view(len(state), values.shape[-1], -1)
    hidden = F.elu(torch.einsum("bn,bnk->bk", values, first) + hyper("hyper_b_1"))
    weighted = (hidden * hyper("hyper_w_final").abs()).sum(-1, keepdim=True)
    return weighted + hyper("V")


def moments(batch: Any, settings: Settings) -> tuple[float, float]:
    """Return the mean and the standard deviation of all rewards of a batch."""
    every = rewards(batch.reshape(-1), settings)
    if settings.algorithm == "iql":
        living = every[~batch.reshape(-1)[settings.group, "done"][..., 0]]
        every = every[..., 0] if settings.team else living
    return float(every.mean()), float(every.std(correction=0))


def rewards(sequence: Any, settings: Settings) -> Tensor:
    """Return the rewards to learn from, ``[T, k]``: the team's sum, or each agent's."""
    agents = sequence["next", settings.group, "reward"][..., 0].double()
    if settings.algorithm != "iql":
        return agents.sum(-1, keepdim=True)
    return agents.mean(-1, keepdim=True).expand_as(agents) if settings.team else agents


def known(sequence: Any, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return which agents have a next value, what ended, and what can be learnt.

    An agent has a next value if it acts next, or would but for a time limit. What has
    neither a next value nor an end cannot be learnt.

    Returns:
        Bool ``[T, n]``, ``[T, k]`` and ``[T, k]``.
    """
    root, after = sequence[settings.group], sequence["next", settings.group]
    alive, acts = ~root["done"][..., 0], root["mask"]
    done, fell = after["done"][..., 0], after["terminated"][..., 0]
    follows = after["mask"] & ~done
    if settings.bootstrap_limits:
        nobody_waits = ~(alive & ~acts).any(-1, keepdim=True)
        follows |= acts & done & ~fell & nobody_waits
    kind = "terminated" if settings.bootstrap_limits else "done"
    if settings.algorithm == "iql":
        ended = after[kind][..., 0]
        return follows, ended, acts & (ended | follows)
    ended = sequence["next", kind]
    return follows, ended, ended | follows.any(-1, keepdim=True)


def squared_errors(
    online: Mapping[str, Weights],
    target: Mapping[str, Weights],
    sequence: Any,
    settings: Settings,
    reward_moments: tuple[float, float],
) -> Tensor:
    """Return the squared errors of a sequence that can be learnt, one-dimensional."""
    name = settings.group
    root, after = sequence[name], sequence["next", name]
    # The first observation, and those after each frame; what an agent remembers ends
    # with the sequence.
    path = {
        key: torch.cat([root["observation", key][:1], after["observation", key]])
        for key in root["observation"].keys()
    }
    absent = torch.cat([root["terminated"][:1], after["terminated"]])[..., 0]
    follows, ended, counts = known(sequence, settings)

    def over(network: Weights) -> Tensor:
        group = {"observation": path, "terminated": absent}
        return action_values(network, group, settings)

    with torch.no_grad():
        values_after = over(target["values"])[1:]
        judged = over(online["values"])[1:] if settings.double_q else values_after
        if "action_mask" in after.keys():
            judged = judged.masked_fill(~after["action_mask"], -torch.inf)
        best = judged.argmax(-1, keepdim=True)
        following = values_after.gather(-1, best)[..., 0] * follows
        following = mix(target.get("mixer", {}), following, after, settings)
        reward = rewards(sequence, settings)
        if settings.standardise_rewards:
            mean, deviation = reward_moments
            reward = (reward - mean) / deviation
        bootstrap = torch.where(ended, 0.0, settings.gamma * following)
        goal = settings.reward_scale * reward + bootstrap
    chosen = over(online["values"])[:-1].gather(-1, root["action"].unsqueeze(-1))
    value = mix(online.get("mixer", {}), chosen[..., 0] * root["mask"], root, settings)
    return ((value - goal) ** 2)[counts]


def loss(
    online: Mapping[str, Weights],
    target: Mapping[str, Weights],
    batch: Any,
    settings: Settings,
    drawn: Sequence[Frames],
) -> Tensor:
    """Return the mean squared error of the drawn sequences.

    Args:
        online: weights of ``values`` and ``mixer``.
        target: those of the target networks.
        batch: ``[B, T]`` of a collector: all that was collected.
        settings: of the learner.
        drawn: sequences of the minibatch, each as often as it was drawn.
    """
    reward_moments = moments(batch, settings)
    errors = [
        squared_errors(online, target, batch[row, first:stop], settings, reward_moments)
        for row, first, stop in drawn
    ]
    return torch.cat(errors).mean()


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
