"""``MultiAgentMLP``: a multi-layer perceptron per agent, or a shared one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from marl_collect.models.base import FEATURES, MultiAgentNetBase
from marl_collect.options import Option, require

LayerFactory = Callable[..., nn.Module]
Options = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Keyword arguments for every layer of a kind, or one mapping per layer."""


class MultiAgentMLP(MultiAgentNetBase):
    """Maps ``[*B, n_agents, n_agent_inputs]`` to ``[*B, n_agents, n_agent_outputs]``.

    The arguments have the names, order and defaults of TorchRL 0.14's class.

    Args:
        n_agent_inputs: features of one agent; ``None`` infers them from an input.
        n_agent_outputs: outputs of one agent.
        n_agents: number of agents.
        centralised: whether each agent sees the inputs of all agents.
        share_params: whether all agents share one network.
        device: device of the weights; ``"meta"`` costs no memory.
        depth: number of hidden layers. Without ``depth`` and ``num_cells`` there are
            none, and the network is one linear layer.
        num_cells: units of each hidden layer: one number for all ``depth`` layers (32
            if only ``depth`` is given), or one per layer.
        activation_class: builds the activation after each hidden layer.
        activation_kwargs: arguments of ``activation_class``.
        norm_class: builds the normalisation layer before each activation.
        norm_kwargs: arguments of ``norm_class``, such as ``{"normalized_shape": 32}``.
        dropout: probability of dropping a hidden unit, independently for each agent.
        bias_last_layer: whether the last linear layer has a bias.
        layer_class: builds the linear layers: ``layer_class(in, out, bias=...)``.
        layer_kwargs: further arguments of ``layer_class``.
        activate_last_layer: whether an activation follows the last layer too.
        centralized: the same as ``centralised``.

    Raises:
        TypeError: if an argument has another type, or ``centralised`` or
            ``share_params`` is missing.
        ValueError: if a number is too small, ``depth`` and ``num_cells`` contradict
            each other, a list of arguments has not one mapping per layer, or there are
            ``norm_kwargs`` but no ``norm_class``.

    Example:
        >>> actor = MultiAgentMLP(31, 4, 3, centralised=False, share_params=False)
        >>> actor(torch.zeros(10, 3, 31)).shape
        torch.Size([10, 3, 4])
    """

    def __init__(
        self,
        n_agent_inputs: int | None,
        n_agent_outputs: int,
        n_agents: int,
        *,
        centralised: bool | None = None,
        share_params: bool | None = None,
        device: torch.device | str | None = None,
        depth: int | None = None,
        num_cells: int | Sequence[int] | None = None,
        activation_class: LayerFactory = nn.Tanh,
        activation_kwargs: Options = None,
        norm_class: LayerFactory | None = None,
        norm_kwargs: Options = None,
        dropout: float | None = None,
        bias_last_layer: bool = True,
        layer_class: LayerFactory = nn.Linear,
        layer_kwargs: Options = None,
        activate_last_layer: bool = False,
        centralized: bool | None = None,
    ) -> None:
        super().__init__(
            n_agents=n_agents,
            centralised=centralised,
            share_params=share_params,
            centralized=centralized,
            device=device,
            n_inputs=require("n_agent_inputs", n_agent_inputs, int | None, FEATURES),
            n_outputs=require("n_agent_outputs", n_agent_outputs, int, FEATURES),
            cells=hidden_sizes(depth, num_cells),
            activation=(activation_class, activation_kwargs),
            norm=(norm_class, norm_kwargs),
            dropout=dropout,
            bias_last_layer=bias_last_layer,
            linear=(layer_class, layer_kwargs),
            activate_last_layer=require(
                "activate_last_layer", activate_last_layer, bool, Option("")
            ),
        )
        self.n_features = n_agent_inputs
        self.n_agent_outputs = n_agent_outputs

    @property
    def n_agent_inputs(self) -> int | None:
        """Features of one agent; ``None`` if not yet known."""
        return self.n_features

    def _build_single_net(
        self, *, device: torch.device | str | None, **kwargs: Any
    ) -> nn.Module:
        n_inputs = kwargs.pop("n_inputs")
        if n_inputs is not None and self.centralised:
            n_inputs *= self.n_agents
        return mlp(n_inputs, device=device, **kwargs)


def hidden_sizes(
    depth: int | None, num_cells: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the units of each hidden layer; see ``MultiAgentMLP``."""
    if num_cells is None:
        return (32,) * (depth or 0)
    if isinstance(num_cells, int):
        if depth is None:
            raise ValueError(
                f"num_cells={num_cells} sets the units of each hidden layer: pass the "
                "number of layers as depth too, or pass num_cells as a list."
            )
        num_cells = (num_cells,) * depth
    for cells in num_cells:
        require("num_cells", cells, int, Option("", at_least=1))
    if depth is not None and depth != len(num_cells):
        raise ValueError(
            f"depth={depth} contradicts num_cells={list(num_cells)}, which has "
            f"{len(num_cells)} layers."
        )
    return tuple(num_cells)


def mlp(
    n_inputs: int | None,
    n_outputs: int,
    cells: Sequence[int],
    *,
    activation: tuple[LayerFactory, Options] = (nn.Tanh, None),
    norm: tuple[LayerFactory | None, Options] = (None, None),
    dropout: float | None = None,
    bias_last_layer: bool = True,
    linear: tuple[LayerFactory, Options] = (nn.Linear, None),
    activate_last_layer: bool = False,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """Build one perceptron of linear, dropout, normalisation and activation layers."""
    sizes = (*cells, n_outputs)
    last = len(sizes) - 1
    # For layers without a device argument, such as normalisation.
    check_norm(*norm)
    linear_kwargs = _per_layer("layer_kwargs", linear[1], len(sizes))
    activations = len(cells) + activate_last_layer
    norm_kwargs = _per_layer("norm_kwargs", norm[1], activations)
    activation_kwargs = _per_layer("activation_kwargs", activation[1], activations)
    with torch.device(torch.get_default_device() if device is None else device):
        layers: list[nn.Module] = []
        width = n_inputs
        for index, size in enumerate(sizes):
            options = {"bias": bias_last_layer or index < last}
            options |= linear_kwargs[index]
            layers.append(_linear_layer(linear[0], width, size, options))
            width = size
            if index == last and not activate_last_layer:
                break
            if dropout is not None:
                layers.append(nn.Dropout(dropout))
            if norm[0] is not None:
                layers.append(norm[0](**norm_kwargs[index]))
            layers.append(activation[0](**activation_kwargs[index]))
    return nn.Sequential(*layers)


def _linear_layer(
    factory: LayerFactory, n_inputs: int | None, n_outputs: int, options: dict[str, Any]
) -> nn.Module:
    if n_inputs is not None:
        return factory(n_inputs, n_outputs, **options)
    if factory is not nn.Linear:
        raise ValueError(
            f"n_agent_inputs=None needs layer_class=nn.Linear, but it is {factory!r}: "
            "pass the number of inputs."
        )
    return nn.LazyLinear(n_outputs, **options)


def check_norm(norm_class: LayerFactory | None, norm_kwargs: Options) -> None:
    """Check that there is a normalisation layer for its arguments.

    Raises:
        ValueError: if there is none.
    """
    if norm_class is None and norm_kwargs:
        raise ValueError(
            f"norm_kwargs is {norm_kwargs!r}, but without norm_class there is no "
            "normalisation: pass both, or omit norm_kwargs."
        )


def _per_layer(name: str, options: Options, layers: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each layer of a kind.

    Args:
        name: of the argument, for errors.
        options: for all layers, or one mapping per layer.
        layers: their number.

    Raises:
        ValueError: if there are more or fewer mappings than layers.
    """
    if options is None or isinstance(options, Mapping):
        return [dict(options or {})] * layers
    if len(options) != layers:
        raise ValueError(
            f"{name} has {len(options)} entries, but there are {layers} such layers: "
            "pass one mapping for all of them, or one per layer."
        )
    return list(map(dict, options))
