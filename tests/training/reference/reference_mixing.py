"""VDN and QMIX from their definitions: the error of a team's value, frame by frame."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import reference_networks as networks
import torch
import torch.nn.functional as F
from reference_networks import Weights
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """Of a learner, as its options name them."""

    group: str
    qmix: bool
    centralised: bool
    ids: bool
    gamma: float
    scale: float


def action_values(weights: Weights, group: Any, settings: Settings) -> Tensor:
    """Return the values of all actions, ``[N, n, actions]``."""
    x = networks.encode(group["observation"], weights, settings.ids)
    x = networks.everybody(x) if settings.centralised else x
    selected = {k: w for k, w in weights.items() if "images" not in k}
    return networks.perceptron(x, networks.layers(selected))


def mix(weights: Weights, values: Tensor, group: Any, settings: Settings) -> Tensor:
    """Return the team's value ``[N]`` of the agents' values ``[N, n]``."""
    if not settings.qmix:
        return values.sum(-1)
    encoder = {k: w for k, w in weights.items() if "encoder" in k}
    x = networks.encode(group["observation"], encoder)
    last = networks.layers(encoder, "mlp")
    if last:  # After convolutions.
        x = F.relu(networks.linear(x, *last[0]))
    x = x.flatten(-2)
    x = x - x.mean(-1, keepdim=True)
    state = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)

    def hyper(name: str) -> Tensor:
        ((weight, bias),) = networks.layers(weights, f".{name}.")
        return state @ weight.T + bias

    first = hyper("hyper_w_1").abs().view(len(state), values.shape[-1], -1)
    hidden = F.elu(torch.einsum("bn,bnk->bk", values, first) + hyper("hyper_b_1"))
    hidden_layer, output_layer = networks.layers(weights, ".V.")
    base = (
        F.relu(state @ hidden_layer[0].T + hidden_layer[1]) @ output_layer[0].T
        + output_layer[1]
    )
    return (hidden * hyper("hyper_w_final").abs()).sum(-1) + base[:, 0]


def transitions(batch: Any, settings: Settings) -> tuple[list[int], Tensor]:
    """Return the frames of a flat batch to train on, and who acts after each, ``[n]``.

    A frame counts if the episode terminates after it, or if somebody's next value is
    known: that of an agent that acts next, or would but for a limit.
    """
    root, after = batch[settings.group], batch["next", settings.group]
    frames, acting = [], []
    for t in range(len(batch)):
        alive, acts = ~root["done"][t, :, 0], root["mask"][t]
        nobody_waits = not bool((alive & ~acts).any())
        done, fell = after["done"][t, :, 0], after["terminated"][t, :, 0]
        follows = after["mask"][t] & ~done
        if nobody_waits:
            follows |= acts & done & ~fell
        if follows.any() or batch["next", "terminated"][t].item():
            frames.append(t)
            acting.append(follows)
    return frames, torch.stack(acting)


def loss(
    online: Mapping[str, Weights],
    target: Mapping[str, Weights],
    batch: Any,
    settings: Settings,
    rows: Any = slice(None),
) -> Tensor:
    """Return the mean squared error of the team's value.

    Args:
        online: weights of ``values`` and ``mixer``.
        target: those of the target networks.
        batch: frames ``[B * T]`` of a collector.
        s: settings.
        rows: which of the frames that count.
    """
    frames, acting = transitions(batch, settings)
    data, acting = batch[frames][rows], acting[rows]
    root, after = data[settings.group], data["next", settings.group]
    with torch.no_grad():
        options = action_values(target["values"], after, settings)
        if "action_mask" in after.keys():
            options = options.masked_fill(~after["action_mask"], -torch.inf)
        best = options.max(-1).values * acting
        following = mix(target["mixer"], best, after, settings)
        reward = settings.scale * after["reward"].double().sum((-2, -1))
        goes_on = ~data["next", "terminated"][:, 0]
        td_target = reward + settings.gamma * torch.where(goes_on, following, 0.0)
    actions = root["action"].unsqueeze(-1)
    values = (
        action_values(online["values"], root, settings).gather(-1, actions).squeeze(-1)
    )
    value = mix(online["mixer"], values * root["mask"], root, settings)
    return ((value - td_target) ** 2).mean()
