"""Layers that hold one set of weights per agent and apply them all at once.

Inputs and outputs are ``[n_agents, rows, *features]``: agents first, because batched
matrix products want them so. Weights are stacked along a first dimension of agents. An
input ``[1, rows, *features]`` is one that all agents share.
"""

import abc
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

# For more rows than this, one wide product is faster than one per agent, although it
# needs a copy of the weights in another order.
_WIDE_ROWS = 512


class AgentLayer(nn.Module, abc.ABC):
    """One layer of each agent, in one module."""

    n_agents: int

    @abc.abstractmethod
    def torch_layout(self) -> dict[str, Tensor]:
        """Map a single agent's tensor names to views ``[n_agents, *single shape]``.

        The shapes are those of the torch layer that one agent would have. Writing to
        the views writes to the layer.
        """

    @abc.abstractmethod
    def agent(self, index: int) -> nn.Module:
        """Build agent ``index``'s own layer; it shares memory with this one."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Draw new weights, for each agent as its own torch layer would."""


class StackedLinear(AgentLayer):
    """``n_agents`` linear layers, applied as one batched matrix product.

    Attributes:
        weight: ``[n_agents, in_features, out_features]``.
        bias: ``[n_agents, 1, out_features]``, or ``None``.
    """

    pure_forward = True

    def __init__(
        self,
        n_agents: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n_agents = n_agents
        self.in_features = in_features
        self.out_features = out_features
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(
            torch.empty(n_agents, in_features, out_features, **like)
        )
        self.bias: nn.Parameter | None
        # The dimension of 1 stays in the parameter: adding it in each call costs time.
        if bias:
            self.bias = nn.Parameter(torch.empty(n_agents, 1, out_features, **like))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from the distribution of ``n_agents`` separate ``nn.Linear``."""
        if is_lazy(self.weight) or self.in_features == 0:
            return
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n_agents or 1, rows, in]`` to ``[n_agents, rows, out]``."""
        own = self._parameters
        weight = own.get("weight")
        # A functional call may have put plain tensors in their places.
        weight = self.weight if weight is None else weight
        bias = own.get("bias")
        bias = self.bias if bias is None else bias
        if x.shape[0] != self.n_agents:
            return self._spread(x, weight, bias)
        if bias is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(bias, x, weight)

    def _spread(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply all agents' weights to one input."""
        n = self.n_agents
        # A compiler must not make the choice depend on the number of rows.
        if not torch.compiler.is_compiling() and x.shape[1] > _WIDE_ROWS:
            _, width, out = weight.shape
            wide = weight.mT.reshape(n * out, width)
            flat = None if bias is None else bias.reshape(n * out)
            return F.linear(x, wide, flat).view(-1, n, out).transpose(0, 1)
        x = x.expand(n, -1, -1)
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)

    def torch_layout(self) -> dict[str, Tensor]:
        """Views ``weight [n, out, in]`` and ``bias [n, out]``."""
        layout = {"weight": self.weight.detach().mT}
        if self.bias is not None:
            layout["bias"] = self.bias.detach().squeeze(1)
        return layout

    def agent(self, index: int) -> nn.Module:
        """Build the ``nn.Linear`` of one agent."""
        has_bias = self.bias is not None
        single = nn.Linear(self.in_features, self.out_features, has_bias, "meta")
        return share_memory(single, self.torch_layout(), index, self)

    def extra_repr(self) -> str:
        """Describe the sizes."""
        return (
            f"n_agents={self.n_agents}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


class LazyStackedLinear(LazyModuleMixin, StackedLinear):
    """A ``StackedLinear`` that learns ``in_features`` from its first input."""

    cls_to_become = StackedLinear

    def __init__(
        self,
        n_agents: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(n_agents, 0, 0, False, device, dtype)
        self.out_features = out_features
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter("weight", lazy_parameter(**like))
        if bias:
            self.register_parameter("bias", lazy_parameter(**like))

    def initialize_parameters(self, x: Tensor) -> None:
        """Allocate and draw the weights for inputs like ``x``."""
        if not self.has_uninitialized_params():
            return
        self.in_features = x.shape[-1]
        n, out = self.n_agents, self.out_features
        with torch.no_grad():
            allocate(self.weight, (n, self.in_features, out))
            allocate(self.bias, (n, 1, out))
            self.reset_parameters()


def reset_parameters(module: nn.Module) -> None:
    """Run the initialisers within ``module``, children before parents."""
    for child in module.children():
        reset_parameters(child)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def lazy_parameter(
    device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """Make a parameter whose shape is not known yet."""
    made: Any = UninitializedParameter
    parameter: nn.Parameter = made(device=device, dtype=dtype)
    return parameter


def allocate(parameter: Tensor | None, shape: tuple[int, ...]) -> None:
    """Give a parameter its shape and memory, if it lacks them."""
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize(shape)


def share_memory(
    single: nn.Module, layout: dict[str, Tensor], index: int, owner: nn.Module
) -> nn.Module:
    """Let ``single`` use row ``index`` of each stacked tensor, without a copy."""
    for path, stacked in layout.items():
        prefix, _, name = path.rpartition(".")
        place = single.get_submodule(prefix)
        if isinstance(getattr(place, name), nn.Parameter):
            setattr(place, name, nn.Parameter(stacked[index]))
        else:
            setattr(place, name, stacked[index])
    return single.train(owner.training)
