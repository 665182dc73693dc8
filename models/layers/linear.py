"""Layers with one set of weights per agent, which are applied all at once.

Inputs and outputs are ``[n_agents, rows, *features]``; agents come first, as batched
matrix products need them. Weights are stacked along a first dimension of agents. All
agents share an input ``[1, rows, *features]``.
"""

import abc
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy
from typing_extensions import override

# For more rows than this, a single wide product is faster than one product per agent,
# although it needs a reordered copy of the weights.
_WIDE_ROWS = 512


class AgentLayer(nn.Module, abc.ABC):
    """The same layer of all agents as one module."""

    n_agents: int

    @abc.abstractmethod
    def torch_layout(self) -> dict[str, Tensor]:
        """Map the tensor names of the torch layer to views ``[n_agents, *shape]``.

        ``shape`` is the shape in one agent's torch layer. Writing to the views writes
        to the layer.
        """

    @abc.abstractmethod
    def agent(self, index: int) -> nn.Module:
        """Build agent ``index``'s torch layer, which shares memory with this one."""

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Initialise the weights of each agent as its torch layer does."""


class StackedLinear(AgentLayer):
    """``n_agents`` linear layers, applied as one batched matrix product.

    Attributes:
        weight: ``[n_agents, in_features, out_features]``.
        bias: ``[n_agents, 1, out_features]``, or ``None``.
    """

    pure_forward = True
    bias: nn.Parameter | None

    def __init__(self, n_agents: int, single: nn.Linear) -> None:
        """Allocate the weights of ``n_agents`` layers like ``single``."""
        super().__init__()
        self.n_agents = n_agents
        self.in_features = single.in_features
        self.out_features = out = single.out_features
        self.weight = stacked_like(single.weight, (n_agents, self.in_features, out))
        # The bias has a dimension of size 1, because adding it in each call costs time.
        bias: Any = single.bias
        bias = None if bias is None else stacked_like(bias, (n_agents, 1, out))
        self.register_parameter("bias", bias)

    @override
    def reset_parameters(self) -> None:
        if is_lazy(self.weight) or self.in_features == 0:
            return
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n_agents or 1, rows, in]`` to ``[n_agents, rows, out]``."""
        parameters = self._parameters
        weight = parameters.get("weight")
        # In a functional call, the attributes may be plain tensors.
        weight = self.weight if weight is None else weight
        bias = parameters.get("bias")
        bias = self.bias if bias is None else bias
        if x.shape[0] != self.n_agents:
            return self._expand(x, weight, bias)
        if bias is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(bias, x, weight)

    def _expand(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply all agents' weights to a shared input."""
        n = self.n_agents
        # Compiled code must not depend on the number of rows.
        if not torch.compiler.is_compiling() and x.shape[1] > _WIDE_ROWS:
            _, width, out = weight.shape
            wide = weight.mT.reshape(n * out, width)
            flat = None if bias is None else bias.reshape(n * out)
            return F.linear(x, wide, flat).view(-1, n, out).transpose(0, 1)
        x = x.expand(n, -1, -1)
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)

    @override
    def torch_layout(self) -> dict[str, Tensor]:
        layout = {"weight": self.weight.detach().mT}
        if self.bias is not None:
            layout["bias"] = self.bias.detach().squeeze(1)
        return layout

    @override
    def agent(self, index: int) -> nn.Module:
        has_bias = self.bias is not None
        single = nn.Linear(self.in_features, self.out_features, has_bias, "meta")
        return share_memory(single, self.torch_layout(), index, self)

    @override
    def extra_repr(self) -> str:
        return (
            f"n_agents={self.n_agents}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


class LazyStackedLinear(LazyModuleMixin, StackedLinear):
    """A ``StackedLinear`` that infers ``in_features`` from its first input."""

    cls_to_become = StackedLinear

    def initialize_parameters(self, x: Tensor) -> None:
        """Allocate and initialise the weights for inputs like ``x``."""
        if not self.has_uninitialized_params():
            return
        self.in_features = x.shape[-1]
        n, out = self.n_agents, self.out_features
        with torch.no_grad():
            allocate(self.weight, (n, self.in_features, out))
            allocate(self.bias, (n, 1, out))
            self.reset_parameters()


def reset_parameters(module: nn.Module) -> None:
    """Call ``reset_parameters`` of all submodules, children before parents."""
    for child in module.children():
        reset_parameters(child)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def stacked_like(tensor: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Return an uninitialised parameter of all agents, for one of a single agent.

    Args:
        tensor: parameter of one agent, for dtype and device. If it is lazy, the result
            is too.
        shape: of the result.
    """
    if is_lazy(tensor):
        lazy: Any = UninitializedParameter
        parameter: nn.Parameter = lazy(device=tensor.device, dtype=tensor.dtype)
        return parameter
    return nn.Parameter(tensor.detach().new_empty(shape))


def allocate(parameter: Tensor | None, shape: tuple[int, ...]) -> None:
    """Allocate a parameter if it has no shape yet."""
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize(shape)


def share_memory(
    single: nn.Module, layout: dict[str, Tensor], index: int, owner: nn.Module
) -> nn.Module:
    """Make the tensors of ``single`` views of row ``index`` of the stacked tensors."""
    for path, stacked in layout.items():
        prefix, _, name = path.rpartition(".")
        module = single.get_submodule(prefix)
        if isinstance(getattr(module, name), nn.Parameter):
            setattr(module, name, nn.Parameter(stacked[index]))
        else:
            setattr(module, name, stacked[index])
    return single.train(owner.training)
