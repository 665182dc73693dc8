"""Convolutions with weights per agent, applied as one grouped convolution."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from typing_extensions import override

from marl_collect.models.layers.linear import (
    AgentLayer,
    allocate,
    share_memory,
    stacked_like,
)


class StackedConv2d(AgentLayer):
    """``n_agents`` two-dimensional convolutions, applied as one grouped convolution.

    Attributes:
        weight: ``[n_agents, out_channels, in_channels, *kernel_size]``.
        bias: ``[n_agents, out_channels]``, or ``None``.
    """

    pure_forward = True
    bias: nn.Parameter | None

    def __init__(self, n_agents: int, single: nn.Conv2d) -> None:
        super().__init__()
        self.n_agents = n_agents
        self.options: dict[str, Any] = {
            "in_channels": single.in_channels,
            "out_channels": single.out_channels,
            "kernel_size": single.kernel_size,
            "stride": single.stride,
            "padding": single.padding,
            "dilation": single.dilation,
        }
        sizes = (single.out_channels, single.in_channels, *single.kernel_size)
        self.weight = stacked_like(single.weight, (n_agents, *sizes))
        bias: Any = single.bias
        if bias is not None:
            bias = stacked_like(bias, (n_agents, single.out_channels))
        self.register_parameter("bias", bias)

    @override
    def reset_parameters(self) -> None:
        if is_lazy(self.weight) or self.weight.numel() == 0:
            return
        bound = 1 / math.sqrt(math.prod(self.weight.shape[2:]))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n_agents or 1, rows, channels, *size]`` to all agents' outputs."""
        n = self.n_agents
        groups = x.shape[0]
        # Concatenate the channels of all agents. After the first layer this is a view,
        # because the output of the previous layer has this memory order.
        grouped = x.transpose(0, 1).flatten(1, 2)
        out = F.conv2d(
            grouped,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            stride=self.options["stride"],
            padding=self.options["padding"],
            dilation=self.options["dilation"],
            groups=groups,
        )
        return out.unflatten(1, (n, -1)).transpose(0, 1)

    @override
    def torch_layout(self) -> dict[str, Tensor]:
        layout = {"weight": self.weight.detach()}
        if self.bias is not None:
            layout["bias"] = self.bias.detach()
        return layout

    @override
    def agent(self, index: int) -> nn.Module:
        has_bias = self.bias is not None
        single = nn.Conv2d(**self.options, bias=has_bias, device="meta")
        return share_memory(single, self.torch_layout(), index, self)

    @override
    def extra_repr(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"n_agents={self.n_agents}, {options}, bias={self.bias is not None}"


class LazyStackedConv2d(LazyModuleMixin, StackedConv2d):
    """A ``StackedConv2d`` that infers ``in_channels`` from its first input."""

    cls_to_become = StackedConv2d

    def initialize_parameters(self, x: Tensor) -> None:
        """Allocate and initialise the weights for inputs like ``x``."""
        if not self.has_uninitialized_params():
            return
        self.options["in_channels"] = x.shape[-3]
        out, kernel = self.options["out_channels"], self.options["kernel_size"]
        with torch.no_grad():
            shape = (self.n_agents, out, x.shape[-3], *kernel)
            allocate(self.weight, shape)
            allocate(self.bias, (self.n_agents, out))
            self.reset_parameters()
