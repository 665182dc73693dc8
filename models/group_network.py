"""Builds the networks of a group: from the arrays of its observation to its head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from marl_collect.core.description import GroupDescription
from marl_collect.models.attention import ATTENTION, MultiAgentAttention, flag_leaf
from marl_collect.models.convnet import MultiAgentConvNet
from marl_collect.models.last_action import LastAction
from marl_collect.models.layers.inputs import (
    ImageInput,
    Leaf,
    LocScale,
    VectorInput,
    observation_leaves,
)
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.models.recurrent.networks import MultiAgentGRU, MultiAgentLSTM

Recurrent = MultiAgentGRU | MultiAgentLSTM
After = Callable[[int], nn.Module]
"""Builds the network after an encoder, from its number of features."""


class Outputs(Protocol):
    """What follows a network, such as an ``ActionHead``.

    Attributes:
        n_outputs: features of one agent that it reads.
        needs_scale: whether it reads means and standard deviations.
    """

    n_outputs: int
    needs_scale: bool


@final
@dataclass
class Numbers:
    """What follows a network whose outputs are used as they are, such as values."""

    n_outputs: int
    needs_scale: bool = False


@final
class GroupNetwork(nn.Module):
    """Encodes images and vectors of an observation, then applies another network.

    Args:
        leaves: the arrays of the observation.
        n_agents: number of agents in the group.
        options: see ``PolicyOptions``. Convolutions always see one agent's images;
            ``centralised`` applies to the network after them.
        after: builds the network after the encoders.
    """

    pure_forward = True

    def __init__(
        self,
        leaves: Sequence[Leaf],
        n_agents: int,
        options: PolicyOptions,
        after: After,
    ) -> None:
        super().__init__()
        self.is_image = [leaf.kind == "image" for leaf in leaves]
        images = [leaf for leaf in leaves if leaf.kind == "image"]
        vectors = [leaf for leaf in leaves if leaf.kind != "image"]
        self.vectors = VectorInput(vectors) if vectors else None
        n_features = self.vectors.n_features if self.vectors else 0
        self.images = nn.ModuleList()
        for leaf in images:
            conv = _convolutions(leaf, n_agents, options)
            self.images.append(conv)
            n_features += _n_features(conv, leaf, n_agents)
        self.n_ids = n_agents if options.agent_ids else 0
        self.agent: int | None = None
        self.mlp = after(n_features + self.n_ids)

    @property
    def by_row(self) -> bool:
        """Whether rows are treated alike: an identity tells agents apart."""
        return not self.n_ids or self.agent is not None

    def keep_agent(self, agent: int) -> None:
        """Become the network of one agent: its inputs have one agent from now on."""
        self.agent = agent

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Map arrays ``[*B, n_agents, *shape]`` to the outputs."""
        pairs = list(zip(self.is_image, values, strict=True))
        images = [value for is_image, value in pairs if is_image]
        features = [
            conv(image) for conv, image in zip(self.images, images, strict=True)
        ]
        if self.vectors is not None:
            features.append(self.vectors(*(v for is_image, v in pairs if not is_image)))
        if self.n_ids:
            ids = identities(self.n_ids, features[0])
            if self.agent is not None:
                ids = ids[..., self.agent : self.agent + 1, :]
            features.append(ids)
        out: Tensor | tuple[Tensor, Tensor] = self.mlp(torch.cat(features, -1))
        return out


def identities(n_agents: int, like: Tensor) -> Tensor:
    """Return one-hot identities ``[*B, n_agents, n_agents]``.

    Args:
        n_agents: number of agents.
        like: features ``[*B, any, any]``, for batch dimensions, dtype and device.
    """
    # Not a buffer, which would have no values if it were built on meta.
    numbers = torch.arange(n_agents, device=like.device)
    one_hot = (numbers.unsqueeze(-1) == numbers).to(like.dtype)
    return one_hot.expand(*like.shape[:-2], n_agents, n_agents)


def feed_forward(
    encoded: Callable[[After], nn.Module],
    head: Outputs,
    n_agents: int,
    options: PolicyOptions,
) -> nn.Module:
    """Build the network of a policy without recurrent state.

    Args:
        encoded: builds the encoder and what follows it, such as ``encoder_of``.
        head: reads the outputs.
        n_agents: number of agents in the group.
        options: of the network.

    Raises:
        TypeError: if ``options.network`` does not return a module.
    """
    layers: dict[str, Any] = {
        "num_cells": options.num_cells,
        "activation_class": options.activation_class,
    }
    factory: Any = options.network or partial(MultiAgentMLP, **layers)
    if options.network == ATTENTION:
        # The flag of ``read_leaves`` is followed by identities only.
        absent = -1 - (n_agents if options.agent_ids else 0)
        factory = partial(MultiAgentAttention, absent=absent, **layers)

    def build(n_inputs: int) -> nn.Module:
        network = factory(
            n_inputs,
            head.n_outputs,
            n_agents,
            centralised=options.centralised,
            share_params=options.share_params,
            device=options.device,
        )
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"network={options.network!r} must return a torch.nn.Module, but "
                f"returned {network!r} of type {type(network).__name__}."
            )
        return _for_head(network, head)

    return encoded(build)


def recurrent_networks(
    encoded: Callable[[After], nn.Module],
    head: Outputs,
    n_agents: int,
    options: PolicyOptions,
) -> tuple[nn.Module, Recurrent, nn.Module]:
    """Build the encoder, the recurrent network and the decoder of a group.

    The hidden layers are the encoder. In a centralised policy, the hidden layers see
    all agents. If there are none, the recurrent network does. The arguments are those
    of ``feed_forward``.
    """
    cells = options.num_cells
    n_encoded = 0

    def encode(n_inputs: int) -> nn.Module:
        nonlocal n_encoded
        n_encoded = cells[-1] if cells else n_inputs
        if not cells:
            return nn.Identity()
        return MultiAgentMLP(
            n_inputs,
            cells[-1],
            n_agents,
            centralised=options.centralised,
            share_params=options.share_params,
            num_cells=cells[:-1],
            activation_class=options.activation_class,
            activate_last_layer=True,
        )

    encoder = encoded(encode)
    kind = MultiAgentLSTM if options.recurrent == "lstm" else MultiAgentGRU
    core: Recurrent = kind(
        n_encoded,
        options.hidden_size,
        n_agents,
        centralised=options.centralised and not cells,
        share_params=options.share_params,
        num_layers=options.num_layers,
    )
    decoder = MultiAgentMLP(
        options.hidden_size,
        head.n_outputs,
        n_agents,
        centralised=False,
        share_params=options.share_params,
    )
    return encoder, core, _for_head(decoder, head)


def read_leaves(
    name: str, group: GroupDescription, options: PolicyOptions
) -> list[Leaf]:
    """List the arrays that a group's network reads: those of agents, and flags.

    Args:
        name: of the group.
        group: has the observation and action spaces.
        options: of the network.

    Raises:
        TypeError: for a space that no network of this package supports.
    """
    leaves = agent_leaves(name, group, options)
    return [*leaves, flag_leaf(name)] if options.network == ATTENTION else leaves


def agent_leaves(
    name: str, group: GroupDescription, options: PolicyOptions
) -> list[Leaf]:
    """List the arrays of what agents observed, then of what they did last.

    The arguments and errors are those of ``read_leaves``.
    """
    leaves = observation_leaves(group.observation, (name, "observation"))
    if options.last_action:
        leaves.append(LastAction.of(name, group).leaf)
    return leaves


def encoder_of(
    leaves: Sequence[Leaf], n_agents: int, options: PolicyOptions
) -> Callable[[After], nn.Module]:
    """Return a function that builds the encoder of a group and what follows it."""

    def encoded(after: After) -> nn.Module:
        if len(leaves) == 1 and leaves[0].is_plain and not options.agent_ids:
            return after(leaves[0].size)
        return GroupNetwork(leaves, n_agents, options, after)

    return encoded


def _for_head(network: nn.Module, head: Outputs) -> nn.Module:
    return nn.Sequential(network, LocScale()) if head.needs_scale else network


def _convolutions(leaf: Leaf, n_agents: int, options: PolicyOptions) -> nn.Sequential:
    conv = MultiAgentConvNet(
        n_agents,
        centralised=False,
        share_params=options.share_params,
        in_features=leaf.size,
        **options.conv,
    )
    joined = leaf.stacked or not options.share_params
    contiguous = joined and conv.dtype == torch.float32
    image = ImageInput(
        channels_last=leaf.channels_last,
        dtype=conv.dtype,
        stacked=leaf.stacked,
        memory_format=torch.contiguous_format if contiguous else torch.preserve_format,
    )
    return nn.Sequential(image, conv)


def _n_features(conv: nn.Module, leaf: Leaf, n_agents: int) -> int:
    """Return the number of outputs of a convolutional network, computed on meta."""
    weights = {name: tensor.to("meta") for name, tensor in conv.state_dict().items()}
    image = torch.empty(1, n_agents, *leaf.shape, device="meta")
    out: Tensor = torch.func.functional_call(conv, weights, (image,))
    return out.shape[-1]
