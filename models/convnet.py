"""``MultiAgentConvNet``: a convolutional network per agent, or a shared one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.models.base import FEATURES, AgentNetworks, MultiAgentNetBase
from marl_collect.models.mlp import LayerFactory, check_norm
from marl_collect.options import require

Size = int | tuple[int, int]


class MultiAgentConvNet(MultiAgentNetBase):
    """Maps ``[*B, n_agents, channels, height, width]`` to ``[*B, n_agents, outputs]``.

    ``outputs`` depends on the size of the images. Images must be floating point and
    channels first; ``ImageInput`` converts them. Names, order and defaults of the
    arguments are those of TorchRL 0.14's class, except for ``dtype``.

    Args:
        n_agents: number of agents.
        centralised: whether each agent sees the images of all agents, as additional
            channels.
        share_params: whether all agents share one network.
        in_features: channels of one agent's image; ``None`` infers them from the first
            input.
        device: device of the weights; ``"meta"`` costs no memory.
        num_cells: channels of each layer; ``None`` is three layers of 32.
        kernel_sizes: one value for all layers, or one per layer.
        strides: one value for all layers, or one per layer.
        paddings: one value for all layers, or one per layer.
        activation_class: builds the activation after each convolution.
        activation_kwargs: arguments of ``activation_class``.
        norm_class: builds the normalisation layer after each activation.
        norm_kwargs: arguments of ``norm_class``.
        centralized: the same as ``centralised``.
        dtype: in which convolutions and their gradients are computed, float32 or
            bfloat16. Weights and outputs are float32 with both.

    Raises:
        TypeError: if ``centralised`` or ``share_params`` is missing.
        ValueError: if the lists have different lengths, for another ``dtype``, or for
            ``norm_kwargs`` without ``norm_class``.
    """

    pure_forward = True
    by_row = AgentNetworks.is_shared_and_decentralised

    def __init__(
        self,
        n_agents: int,
        centralised: bool | None = None,
        share_params: bool | None = None,
        *,
        in_features: int | None = None,
        device: torch.device | str | None = None,
        num_cells: Sequence[int] | None = None,
        kernel_sizes: Size | Sequence[Size] = 5,
        strides: Size | Sequence[Size] = 2,
        paddings: Size | Sequence[Size] = 0,
        activation_class: LayerFactory = nn.ELU,
        activation_kwargs: dict[str, Any] | None = None,
        norm_class: LayerFactory | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        centralized: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"dtype must be torch.float32 or torch.bfloat16, but is {dtype}."
            )
        check_norm(norm_class, norm_kwargs)
        cells = (32, 32, 32) if num_cells is None else tuple(num_cells)
        super().__init__(
            n_agents=n_agents,
            centralised=centralised,
            share_params=share_params,
            centralized=centralized,
            agent_dim=-4,
            device=device,
            in_features=require("in_features", in_features, int | None, FEATURES),
            cells=cells,
            kernels=_per_layer("kernel_sizes", kernel_sizes, len(cells)),
            strides=_per_layer("strides", strides, len(cells)),
            paddings=_per_layer("paddings", paddings, len(cells)),
            activation=(activation_class, activation_kwargs or {}),
            norm=(norm_class, norm_kwargs or {}),
        )
        self.n_features = in_features
        self.dtype = dtype

    @override
    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute the features of every agent's image; see ``MultiAgentNetBase``."""
        weight = next(self.parameters(), None)
        if weight is not None and weight.is_meta and not inputs[0].is_meta:
            # Torch would return memory that nobody has written.
            raise self._other_device(weight, inputs[0])
        if self.dtype == torch.float32:
            return super().forward(*inputs)
        if inputs[0].is_meta:  # Without autocast; shapes do not depend on it.
            return super().forward(*(x.float() for x in inputs))
        with torch.autocast(inputs[0].device.type, self.dtype, cache_enabled=False):
            return super().forward(*inputs).float()

    @override
    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.dtype == torch.float32 else f"{text}, dtype={self.dtype}"

    @property
    def in_features(self) -> int | None:
        """Channels of one agent's image; ``None`` if not yet known."""
        return self.n_features

    def _build_single_net(
        self, *, device: torch.device | str | None, **kwargs: Any
    ) -> nn.Module:
        channels = kwargs["in_features"]
        if channels is not None and self.centralised:
            channels *= self.n_agents
        activation, activation_kwargs = kwargs["activation"]
        norm, norm_kwargs = kwargs["norm"]
        sizes = zip(
            kwargs["cells"],
            kwargs["kernels"],
            kwargs["strides"],
            kwargs["paddings"],
            strict=True,
        )
        with torch.device(torch.get_default_device() if device is None else device):
            layers: list[nn.Module] = []
            for cells, kernel, stride, padding in sizes:
                if channels is None:
                    layers.append(nn.LazyConv2d(cells, kernel, stride, padding))
                else:
                    layers.append(nn.Conv2d(channels, cells, kernel, stride, padding))
                channels = cells
                layers.append(activation(**activation_kwargs))
                if norm is not None:
                    layers.append(norm(**norm_kwargs))
            layers.append(nn.Flatten(-3, -1))
        return nn.Sequential(*layers)


def _per_layer(name: str, value: Size | Sequence[Size], depth: int) -> tuple[Size, ...]:
    """Return one value per layer; a single number applies to all layers."""
    if isinstance(value, int):
        return (value,) * depth
    values = tuple(value)
    if len(values) != depth:
        raise ValueError(
            f"{name}={value!r} has {len(values)} entries, but there are {depth} "
            "layers: pass one number for all layers, or one entry per layer."
        )
    return values
