"""What ``make_policy`` lets one choose."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

import torch
from tensordict.nn import InteractionType
from torch import nn

from marl_collect.models.mlp import LayerFactory

Recurrence = Literal["gru", "lstm"]


@final
@dataclass(frozen=True)
class PolicyOptions:
    """How ``make_policy`` builds the policies of all groups.

    Attributes:
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether one network serves all agents of a group.
        num_cells: units of the hidden layers.
        activation_class: makes their activations.
        recurrent: ``"gru"`` or ``"lstm"`` gives each group a memory between the hidden
            layers and the head. Collectors carry it; see
            ``set_recurrent_mode`` for training.
        hidden_size: units of the memory.
        num_layers: recurrent layers of the memory.
        conv: arguments of ``MultiAgentConvNet``, for groups that see images.
        device: where to create the weights; ``"meta"`` costs no memory, and collectors
            materialize such a policy.
        return_log_prob: whether ``(group, "action_log_prob")`` is written.
        check_mask: whether an action mask without a legal action is an error.
        check_finite: whether an output of a network that is not finite is an error. The
            check waits for the device in every call.
        default_interaction_type: how to choose where no ``set_interaction_type`` says.
    """

    centralised: bool = False
    share_params: bool = True
    num_cells: tuple[int, ...] = (64, 64)
    activation_class: LayerFactory = nn.Tanh
    recurrent: Recurrence | None = None
    hidden_size: int = 64
    num_layers: int = 1
    conv: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str | None = None
    return_log_prob: bool = True
    check_mask: bool = True
    check_finite: bool = False
    default_interaction_type: InteractionType = InteractionType.DETERMINISTIC

    def __post_init__(self) -> None:
        """Refuse a memory that does not exist."""
        if self.recurrent not in (None, *get_args(Recurrence)):
            raise ValueError(
                "recurrent must be None or one of "
                f"{list(get_args(Recurrence))}, but is {self.recurrent!r}."
            )
