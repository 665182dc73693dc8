"""Stacks one network per agent into a single network that applies them all at once."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from typing_extensions import override

from marl_collect.models.layers.cells import Cell
from marl_collect.models.layers.conv import LazyStackedConv2d, StackedConv2d
from marl_collect.models.layers.linear import (
    AgentLayer,
    LazyStackedLinear,
    StackedLinear,
    reset_parameters,
    share_memory,
)
from marl_collect.policies.fused.elementary import ELEMENTWISE

# These apply to all agents' values unchanged.
_UNCHANGED = (*ELEMENTWISE, nn.Dropout)
# These only apply their children.
_CONTAINERS = (nn.Sequential, nn.ModuleList, Cell)


def stack_agents(singles: Sequence[nn.Module]) -> nn.Module:
    """Build one module that applies ``singles[i]`` to agent ``i``'s input.

    Linear layers become one batched matrix product, convolutions one grouped
    convolution. Activations and dropout are used unchanged. All other layers go through
    ``torch.vmap``.

    Args:
        singles: one module per agent, all with the same structure. Weights are copied.

    Returns:
        A module from ``[n_agents, rows, *features]`` to ``[n_agents, rows, *outputs]``.

    Raises:
        ValueError: for a lazy layer other than LazyLinear and LazyConv2d.
    """
    first = singles[0]
    if isinstance(first, _CONTAINERS):
        return _each_child(
            first,
            lambda name: stack_agents(
                [single.get_submodule(name) for single in singles]
            ),
        )
    if type(first) in _UNCHANGED or _is_flatten(first):
        return copy.deepcopy(first)
    lazy = [name for name, p in first.named_parameters() if is_lazy(p)]
    kind = _stacked(first)
    if kind is not None:
        layer = kind(len(singles), first)
        return layer if lazy else _copy_values(layer, singles)
    if lazy:
        raise ValueError(
            f"{type(first).__name__} has lazy parameters ({lazy}). With one network "
            "per agent only LazyLinear and LazyConv2d may be lazy: pass the input size."
        )
    return StackedModule(singles)


def run_layers(net: nn.Module, x: Tensor) -> Tensor:
    """Return ``net(x)``, without module calls if ``net`` is a plain sequence.

    At batch size 1 a module call costs as much as a layer's arithmetic. Layers with
    hooks are called, because only a module call runs hooks.
    """
    if (
        type(net) is not nn.Sequential
        or net._forward_hooks
        or net._forward_pre_hooks
        or torch.compiler.is_compiling()
        or _has_any_global_hook()
    ):
        out: Tensor = net(x)
        return out
    for layer in net._modules.values():
        x = layer(x) if _is_hooked(layer) else layer.forward(x)
    return x


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module runs a hook."""
    return _is_hooked(module) or _has_any_global_hook()


def _is_hooked(layer: Any) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return bool(hooked or layer._backward_hooks or layer._backward_pre_hooks)


def unstack_agent(stacked: nn.Module, index: int) -> nn.Module:
    """Build agent ``index``'s network, which shares memory with ``stacked``."""
    if isinstance(stacked, AgentLayer):
        return stacked.agent(index)
    if isinstance(stacked, _CONTAINERS):
        layers = dict(stacked.named_children())
        return _each_child(stacked, lambda name: unstack_agent(layers[name], index))
    return copy.deepcopy(stacked)


def torch_layout(stacked: nn.Module) -> dict[str, Tensor]:
    """Map each tensor name of a single network to a view ``[n_agents, *shape]``."""
    layout: dict[str, Tensor] = {}
    for path, layer in stacked.named_modules():
        if isinstance(layer, AgentLayer):
            dot = f"{path}." if path else ""
            layout |= {dot + k: view for k, view in layer.torch_layout().items()}
    return layout


class StackedModule(AgentLayer):
    """``n_agents`` copies of any module, applied with ``torch.vmap``.

    For layers without a batched form. Random layers are independent for each agent.

    Attributes:
        module: one agent's module, whose tensors are stacked ``[n_agents, ...]``.
    """

    pure_forward = True

    def __init__(self, singles: Sequence[nn.Module]) -> None:
        super().__init__()
        self.n_agents = len(singles)
        self.module = copy.deepcopy(singles[0])
        for prefix, owner in list(self.module.named_modules()):
            others = [single.get_submodule(prefix) for single in singles]
            for name in _tensor_names(owner):
                old = getattr(owner, name)
                new = torch.stack([getattr(other, name).detach() for other in others])
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                setattr(owner, name, new)

    def forward(self, x: Tensor) -> Tensor:
        """Apply agent ``i``'s module to ``x[i]``, or to a single shared ``x[0]``."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors.update(self.module.named_buffers())
        if not tensors:
            x = x.expand(self.n_agents, *x.shape[1:])
            out: Tensor = torch.vmap(self.module, randomness="different")(x)
            return out

        def call(tensors_of_agent: dict[str, Tensor], x: Tensor) -> Any:
            return functional_call(self.module, tensors_of_agent, (x,))

        one = x.shape[0] != self.n_agents
        call_all = torch.vmap(call, (0, None if one else 0), randomness="different")
        return call_all(tensors, x[0] if one else x)

    @override
    def torch_layout(self) -> dict[str, Tensor]:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}

    @override
    def agent(self, index: int) -> nn.Module:
        single = copy.deepcopy(self.module)
        return share_memory(single, self.torch_layout(), index, self)

    @override
    def reset_parameters(self) -> None:
        for index in range(self.n_agents):
            reset_parameters(self.agent(index))


def _tensor_names(module: nn.Module) -> list[str]:
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    return parameters + [name for name, _ in module.named_buffers(recurse=False)]


def _each_child(container: nn.Module, child: Callable[[str], nn.Module]) -> nn.Module:
    """Copy ``container`` with new children."""
    names = [name for name, _ in container.named_children()]
    # A shallow copy, because the children are replaced anyway.
    result = copy.copy(container)
    result._modules = {name: child(name) for name in names}
    return result


def _is_flatten(layer: nn.Module) -> bool:
    # With a negative start_dim, the agent dimension makes no difference.
    return type(layer) is nn.Flatten and layer.start_dim < 0


def _copy_values(layer: AgentLayer, singles: Sequence[nn.Module]) -> AgentLayer:
    for name, view in layer.torch_layout().items():
        values = [getattr(single, name).detach() for single in singles]
        view.copy_(torch.stack(values))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(getattr(singles[0], name).requires_grad)
    return layer


_STACKED: dict[type, type[Any]] = {
    nn.Linear: StackedLinear,
    nn.LazyLinear: LazyStackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.LazyConv2d: LazyStackedConv2d,
}


def _stacked(first: nn.Module) -> type[Any] | None:
    """Return the class of all agents' layers like ``first``, if there is one."""
    if type(first) is nn.Conv2d and (first.groups, first.padding_mode) != (1, "zeros"):
        return None
    return _STACKED.get(type(first))
