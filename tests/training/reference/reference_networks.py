"""The networks of learners as functions of their weights, in float64.

Weights are ``[out, in]`` if agents share them, and ``[n, in, out]`` otherwise.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Settings = SimpleNamespace
Weights = Mapping[str, Tensor]
Layers = list[tuple[Tensor, Tensor]]
LAST = "last"
"""Name of the observation that ``observe_last_actions`` adds."""


def settings_of(setup: Any, options: Any, algorithm: Any, **more: Any) -> Settings:
    """Return what is set for a learner by its names, and what follows from it."""
    more |= {"team": options.reward == "team", "attends": options.network is not None}
    return Settings(**vars(options) | vars(algorithm) | vars(setup) | more)


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's weights, which need gradients."""
    return {
        name: weight.detach().double().clone().requires_grad_()
        for name, weight in module.named_parameters()
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map ``[..., n, in]`` to ``[..., n, out]``."""
    if weight.ndim == 2:
        return x @ weight.T + bias
    return torch.einsum("...ni,nio->...no", x, weight) + bias[:, 0]


def layers(weights: Weights, *patterns: str) -> Layers:
    """Return the layers whose name contains all parts, in their order."""
    names = [
        n for n in weights if n.endswith("weight") and all(p in n for p in patterns)
    ]
    return [(weights[n], weights[n.removesuffix("weight") + "bias"]) for n in names]


def hidden_layers(weights: Weights, *also: str) -> Layers:
    """Return the layers between the encoder of images and the recurrent network."""
    names = ("images", ".input.", ".hidden.", "decoder", *also)
    return layers({k: w for k, w in weights.items() if not any(n in k for n in names)})


def perceptron(
    x: Tensor, layer_weights: Layers, *, activate_last: bool = False
) -> Tensor:
    for index, layer in enumerate(layer_weights):
        x = linear(x, *layer)
        if activate_last or index < len(layer_weights) - 1:
            x = torch.tanh(x)
    return x


def convolve(picture: Tensor, layer_weights: Layers) -> Tensor:
    """Map bytes ``[..., n, height, width, channels]`` to features ``[..., n, k]``."""
    x = picture.double().movedim(-1, -3) / 255
    lead, n = x.shape[:-4], x.shape[-4]
    x = x.reshape(-1, *x.shape[-4:])
    out = []
    for agent in range(n):
        y = x[:, agent]
        for weight, bias in layer_weights:
            per_agent = weight.ndim == 5
            kernel, shift = (
                (weight[agent], bias[agent]) if per_agent else (weight, bias)
            )
            y = F.elu(F.conv2d(y, kernel, shift, stride=kernel.shape[-1]))
        out.append(y.flatten(1))
    return torch.stack(out, 1).reshape(*lead, n, -1)


def encode(observation: Any, weights: Weights, ids: bool = False) -> Tensor:
    """Return the features ``[..., n, k]`` that the layers after the encoder read."""
    features = [observation["vector"].double()]
    if "picture" in observation:
        features.insert(0, convolve(observation["picture"], layers(weights, "images")))
    if LAST in observation:
        features.append(observation[LAST].double())
    if ids:
        n = features[0].shape[-2]
        features.append(torch.eye(n).double().expand(*features[0].shape[:-1], n))
    return torch.cat(features, -1)


def observe_last_actions(frames: Any, groups: Mapping[str, int]) -> Any:
    """Return a copy of frames ``[B, T]`` in which agents observe what they did last.

    That is the action of the last frame in which they acted, one-hot of 4 if it is
    Discrete, and 0 until they act in an episode. Episodes begin with the first frame.
    """
    frames = frames.clone()
    for name in groups:
        action = frames[name, "action"]
        did = action if action.is_floating_point() else torch.eye(4)[action]
        now, after = torch.zeros_like(did), torch.zeros_like(did)
        for b in range(did.shape[0]):
            for i in range(did.shape[2]):
                latest = torch.zeros_like(did[0, 0, 0])
                for t in range(did.shape[1]):
                    now[b, t, i] = latest
                    if frames[name, "mask"][b, t, i]:
                        latest = did[b, t, i]
                    after[b, t, i] = latest
                    if frames["next", "done"][b, t, 0]:
                        latest = torch.zeros_like(latest)
        frames[name, "observation", LAST] = now
        frames["next", name, "observation", LAST] = after
    return frames


def everybody(x: Tensor, n: int | None = None) -> Tensor:
    """Give each of ``n`` agents the features of all agents."""
    joint = x.flatten(-2).unsqueeze(-2)
    return joint.expand(*joint.shape[:-2], n or x.shape[-2], joint.shape[-1])


def attend(
    x: Tensor, absent: Tensor, layer_weights: Layers, *, ids: bool = False
) -> Tensor:
    """Return the outputs ``[..., n, k]`` of agents that attend to each other.

    Args:
        x: features ``[..., n, k]``.
        absent: agents to which no other attends, bool ``[..., n]``.
        layer_weights: encoder, queries with keys and values, and the last layer.
        ids: whether identities follow the features and the flag.
    """
    n, outputs = x.shape[-2], []
    x = torch.cat([x, absent.double().unsqueeze(-1)], -1)
    if ids:
        x = torch.cat([x, torch.eye(n).double().expand(*x.shape[:-1], n)], -1)
    for i in range(n):
        # Agent i has a network of its own, which it applies to all agents.
        *encoder, project, last = [
            (weight, bias) if weight.ndim == 2 else (weight[i].T, bias[i, 0])
            for weight, bias in layer_weights
        ]
        codes = perceptron(x, encoder, activate_last=True)
        queries, keys, contents = linear(codes, *project).chunk(3, -1)
        query, size = queries[..., i, :], codes.shape[-1]
        weights, total = [], torch.zeros_like(codes[..., 0, :])
        for j in range(n):
            product = (query * keys[..., j, :]).sum(-1).div(size**0.5).exp()
            visible = ~absent[..., j] if i != j else torch.ones_like(absent[..., j])
            weights.append(product * visible)
        for j in range(n):
            share = weights[j] / torch.stack(weights).sum(0)
            total = total + share.unsqueeze(-1) * contents[..., j, :]
        outputs.append(linear(torch.cat([codes[..., i, :], total], -1), *last))
    return torch.stack(outputs, -2)


def gru(x: Tensor, h: Tensor, weights: Weights) -> Tensor:
    """Return the state ``[..., n, k]`` after a step."""
    (inputs,), (hidden,) = layers(weights, ".input."), layers(weights, ".hidden.")
    a, b = linear(x, *inputs).chunk(3, -1), linear(h, *hidden).chunk(3, -1)
    reset, update = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
    return (1 - update) * torch.tanh(a[2] + reset * b[2]) + update * h


def hidden_size(weights: Weights) -> int:
    """Return the number of units of a recurrent network."""
    ((_, bias),) = layers(weights, ".hidden.")
    return bias.shape[-1] // 3


def unroll(features: Tensor, first: Tensor, begins: Tensor, weights: Weights) -> Tensor:
    """Return the states after each step, ``[S, T, n, k]``.

    Args:
        features: ``[S, T, n, k]``.
        first: states before the first step, ``[S, n, k]``.
        begins: where an episode begins, which resets the states, ``[S, T]``.
        weights: of the recurrent network.
    """
    states, h = [], first
    for t in range(features.shape[1]):
        h = torch.where(begins[:, t, None, None], 0.0, h)
        h = gru(features[:, t], h, weights)
        states.append(h)
    return torch.stack(states, 1)
