"""Mixers for value decomposition: the agents' values to one value of the team."""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Mixer(nn.Module, abc.ABC):
    """Base class of mixers: maps ``[*B, n_agents, 1]`` to ``[*B, 1]``.

    Args:
        n_agents: number of agents.
        state_shape: shape of the state, the second input; ``None`` if the mixer takes
            no state.
    """

    def __init__(self, n_agents: int, state_shape: Sequence[int] | None) -> None:
        super().__init__()
        self.n_agents = n_agents
        self.state_shape = None if state_shape is None else torch.Size(state_shape)

    @abc.abstractmethod
    def mix(self, chosen_action_value: Tensor, state: Tensor | None) -> Tensor:
        """Map ``[*B, n_agents, 1]`` and the state to ``[*B, 1]``. Shapes are valid."""

    def forward(
        self, chosen_action_value: Tensor, state: Tensor | None = None
    ) -> Tensor:
        """Compute the team's value.

        Args:
            chosen_action_value: value of each agent's action, ``[*B, n_agents, 1]``.
            state: the environment's state, ``[*B, *state_shape]``.

        Returns:
            ``[*B, 1]``.

        Raises:
            ValueError: for wrong shapes, or a state that is missing or not expected.
        """
        name = type(self).__name__
        if chosen_action_value.shape[-2:] != (self.n_agents, 1):
            raise ValueError(
                f"{name} expected action values [*B, n_agents={self.n_agents}, 1], but "
                f"found the shape {list(chosen_action_value.shape)}."
            )
        if self.state_shape is None:
            if state is not None:
                raise ValueError(
                    f"{name} takes no state, but got one of shape {list(state.shape)}."
                )
            return self.mix(chosen_action_value, None)
        expected = (*chosen_action_value.shape[:-2], *self.state_shape)
        if state is None or state.shape != expected:
            shape = "none" if state is None else f"the shape {list(state.shape)}"
            raise ValueError(
                f"{name} expected a state of shape {list(expected)}, but found {shape}."
            )
        return self.mix(chosen_action_value, state)

    def load_torchrl_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the weights of TorchRL's mixer, which have the same names."""
        self.load_state_dict(state_dict)


@final
class VDNMixer(Mixer):
    """The sum of the agents' values.

    Args:
        n_agents: number of agents.
        device: as of ``QMixer``. There are no weights to create on it; values are
            mixed where they are.

    Source:
        Sunehag et al., "Value-Decomposition Networks", arXiv 1706.05296, equation 3.
    """

    def __init__(self, n_agents: int, device: torch.device | str | None = None) -> None:
        super().__init__(n_agents, None)
        if device is not None:
            torch.device(device)  # A wrong one is an error here, as for a QMixer.

    @override
    def mix(self, chosen_action_value: Tensor, state: Tensor | None) -> Tensor:
        del state
        return chosen_action_value.sum(-2)


@final
class QMixer(Mixer):
    """A network that is monotonic in each agent's value. The state gives its weights.

    Args:
        state_shape: shape of the state, without batch dimensions.
        mixing_embed_dim: units of the hidden layer.
        n_agents: number of agents.
        device: device of the weights.
        hypernet_embed_dim: units of a hidden layer of the networks that compute the
            weights of both layers. With 0 they are linear, as in the paper and TorchRL;
            the authors' code has 64.

    Source:
        Rashid et al., "QMIX", arXiv 1803.11485, section 4 and figure 2.
    """

    def __init__(
        self,
        state_shape: Sequence[int],
        mixing_embed_dim: int,
        n_agents: int,
        device: torch.device | str | None = None,
        hypernet_embed_dim: int = 0,
    ) -> None:
        super().__init__(n_agents, state_shape)
        size = math.prod(state_shape)
        units, hidden = mixing_embed_dim, hypernet_embed_dim
        self.mixing_embed_dim = units
        self.hyper_w_1 = _hypernet(size, hidden, units * n_agents, device)
        self.hyper_w_final = _hypernet(size, hidden, units, device)
        self.hyper_b_1 = _hypernet(size, 0, units, device)
        self.V = _hypernet(size, units, 1, device)

    @override
    def mix(self, chosen_action_value: Tensor, state: Tensor | None) -> Tensor:
        assert state is not None  # ``forward`` has checked it.
        assert self.state_shape is not None
        batch = chosen_action_value.shape[:-2]
        flat = state.reshape(*batch, math.prod(self.state_shape))
        # Absolute values make the team's value monotonic in each agent's value.
        shape = (*batch, self.n_agents, self.mixing_embed_dim)
        first = self.hyper_w_1(flat).abs().view(shape)
        last = self.hyper_w_final(flat).abs()
        hidden = (chosen_action_value * first).sum(-2) + self.hyper_b_1(flat)
        mixed = (F.elu(hidden) * last).sum(-1, keepdim=True)
        out: Tensor = mixed + self.V(flat)
        return out


def _hypernet(
    size: int, hidden: int, n_outputs: int, device: torch.device | str | None
) -> nn.Module:
    """Return a linear network, or one with a hidden layer."""
    if not hidden:
        return nn.Linear(size, n_outputs, device=device)
    return nn.Sequential(
        nn.Linear(size, hidden, device=device),
        nn.ReLU(),
        nn.Linear(hidden, n_outputs, device=device),
    )
