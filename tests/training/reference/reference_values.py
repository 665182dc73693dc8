"""IQL, VDN and QMIX from their definitions: temporal differences, one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

import reference_networks as networks
import torch
import torch.nn.functional as F
from reference_networks import Settings, Weights
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
