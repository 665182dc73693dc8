"""Options of ``make_policy``."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, Self, final, get_args

import torch
from tensordict.nn import InteractionType
from torch import nn

from marl_collect.core.description import GroupDescription
from marl_collect.models.attention import ATTENTION
from marl_collect.models.distributions.heads import ActionHead, HeadOptions
from marl_collect.models.mlp import LayerFactory
from marl_collect.options import Option, did_you_mean, nearest, require

Recurrence = Literal["gru", "lstm"]

_NUM_CELLS = (64, 64)
_HIDDEN_SIZE = 64
_SWITCHES = (
    *("centralised", "share_params", "agent_ids", "last_action"),
    *("return_log_prob", "check_mask", "check_finite"),
)


class NetworkFactory(Protocol):
    """Builds the network of one group; for example a ``MultiAgentNetBase`` subclass."""

    def __call__(
        self,
        n_inputs: int,
        n_outputs: int,
        n_agents: int,
        *,
        centralised: bool,
        share_params: bool,
        device: torch.device | str | None,
    ) -> nn.Module:
        """Return a module from ``[*B, n_agents, n_inputs]`` to ``[..., n_outputs]``.

        Args:
            n_inputs: features of one agent.
            n_outputs: number of inputs of the head for one agent.
            n_agents: number of agents in the group.
            centralised: whether each agent sees the inputs of its whole group.
            share_params: whether all agents share one network.
            device: device of the weights.
        """
        ...


class HeadFactory(Protocol):
    """Builds the head of one group, which selects the distribution of its actions."""

    def __call__(self, group: GroupDescription, options: HeadOptions) -> ActionHead:
        """Return the head; call ``make_head`` for the default one.

        Args:
            group: has the action space.
            options: to pass to the head.
        """
        ...


@final
@dataclass(frozen=True)
class PolicyOptions:
    """Options of ``make_policy``, for the policies of all groups.

    Attributes:
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether all agents of a group share one network.
        agent_ids: whether each agent's features end with its one-hot identity in the
            group, so that agents that share a network can differ. Works with every
            observation space.
        last_action: whether each agent's features have its last action: one-hot, or the
            numbers of a Box, and 0 at the beginning of an episode. The policy writes it
            for the next frame, as recurrent networks write their state; see
            ``LastActionPolicy``. Frames with random actions (``init_random_frames``)
            do not write it: let a policy with ``epsilon=1`` act there.
        network: builds the network between observation and head; see
            ``NetworkFactory``. ``None`` builds a ``MultiAgentMLP``, ``"attention"`` a
            ``MultiAgentAttention`` over the agents of the group; agents that have
            terminated are not attended to. It needs ``centralised=True``.
        head: builds the head, which turns outputs of the network into actions; see
            ``HeadFactory``. ``None`` chooses one for the action space (``make_head``).
        num_cells: units of the hidden layers of either.
        activation_class: builds the activations of either.
        recurrent: ``"gru"`` or ``"lstm"`` adds a recurrent network between the hidden
            layers and the head. Collectors carry its state; see
            ``set_recurrent_mode`` for training.
        hidden_size: units of the recurrent network; without ``recurrent`` an error,
            like ``num_layers``.
        num_layers: layers of the recurrent network.
        conv: arguments of ``MultiAgentConvNet``, for groups that see images;
            ``{"dtype": torch.bfloat16}`` computes its convolutions in bfloat16.
        device: device of the weights. ``"meta"`` allocates no memory; collectors
            materialize such a policy.
        epsilon: makes the outputs of the network values of Discrete actions, at
            ``(group, "action_value")``. The policy takes the best legal action, or with
            this probability a random one. Epsilon is a buffer of the policy. ``None``:
            the outputs are logits.
        return_log_prob: whether to write ``(group, "action_log_prob")``.
        check_mask: whether an action mask without a legal action is an error.
        check_finite: whether a network output that is not finite is an error. The
            check synchronises with the device in every call.
        default_interaction_type: interaction type outside ``set_interaction_type``.

    Raises:
        TypeError: for an option of another type.
        ValueError: for an unknown ``recurrent``, a layer without units, an ``epsilon``
            that is not a probability, an unknown name of a ``network``, or for options
            that contradict ``network`` or ``head``.
    """

    centralised: bool = False
    share_params: bool = True
    agent_ids: bool = False
    last_action: bool = False
    network: NetworkFactory | Literal["attention"] | None = None
    head: HeadFactory | None = None
    num_cells: tuple[int, ...] = _NUM_CELLS
    activation_class: LayerFactory = nn.Tanh
    recurrent: Recurrence | None = None
    hidden_size: int = _HIDDEN_SIZE
    num_layers: int = 1
    conv: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str | None = None
    epsilon: float | None = None
    return_log_prob: bool = True
    check_mask: bool = True
    check_finite: bool = False
    default_interaction_type: InteractionType = InteractionType.DETERMINISTIC

    @classmethod
    def parse(
        cls,
        caller: str,
        options: Mapping[str, Any],
        known: Collection[str] | None = None,
    ) -> Self:
        """Return the options that a function was called with.

        Args:
            caller: the function, for errors.
            options: by name.
            known: names that the function takes. None: all.

        Raises:
            TypeError: for an unknown option.
        """
        known = known or [entry.name for entry in fields(cls)]
        for name in options.keys() - known:
            raise TypeError(
                f"{caller} has no option {name!r}.{did_you_mean(nearest(name, known))} "
                f"Its options are {', '.join(sorted(known))}."
            )
        return cls(**options)

    def __post_init__(self) -> None:
        """Check ``recurrent``, and options that depend on each other."""
        if self.recurrent not in (None, *get_args(Recurrence)):
            raise ValueError(
                "recurrent must be None or one of "
                f"{list(get_args(Recurrence))}, but is {self.recurrent!r}."
            )
        for name in ("hidden_size", "num_layers"):
            require(name, getattr(self, name), int, Option("", at_least=1))
        self._check_memory()
        for name in _SWITCHES:
            require(name, getattr(self, name), bool, Option(""))
        if not callable(self.activation_class):
            raise TypeError(
                "activation_class must be a class of modules, such as torch.nn.ReLU, "
                f"but is {self.activation_class!r}."
            )
        require("epsilon", self.epsilon, float | None, Option(""))
        if self.epsilon is not None and not 0 <= self.epsilon <= 1:
            raise ValueError(
                f"epsilon must be a probability from 0 to 1, but is {self.epsilon}."
            )
        if self.head is not None and not self.check_mask:
            raise ValueError(
                "head replaces the default head, which check_mask=False would "
                "configure. Leave check_mask out, and set it in the head factory."
            )
        if isinstance(self.network, str):
            self._check_attention(self.network)
            return
        if self.network is None:
            return
        defaults = {
            "recurrent": None,
            "num_cells": _NUM_CELLS,
            "activation_class": nn.Tanh,
        }
        conflicting = [
            name for name, value in defaults.items() if getattr(self, name) != value
        ]
        if conflicting:
            raise ValueError(
                "network replaces the default network, which "
                f"{', '.join(conflicting)} would configure. Leave these options "
                "out, and set them in the network factory, for example with "
                "functools.partial."
            )

    def _check_memory(self) -> None:
        if self.recurrent is not None:
            return
        # Without hidden layers, a centralised critic has the width `hidden_size`.
        sized = self.num_cells and self.hidden_size != _HIDDEN_SIZE
        if sized or self.num_layers != 1:
            raise ValueError(
                f"hidden_size={self.hidden_size} and num_layers={self.num_layers} "
                "configure a recurrent network, but recurrent is None: pass "
                "recurrent='gru' or 'lstm', or num_cells, which has the units of each "
                "hidden layer."
            )

    def _check_attention(self, network: str) -> None:
        if network != ATTENTION:
            raise ValueError(
                f"network must be None, {ATTENTION!r} or a function that builds a "
                f"module, but is {network!r}."
            )
        if not self.centralised:
            raise ValueError(
                "network='attention' attends to the other agents of the group, which "
                "only centralised networks see: pass centralised=True, or omit network."
            )
        if self.recurrent is not None:
            raise ValueError(
                f"network='attention' has no memory, but recurrent={self.recurrent!r}: "
                "omit one of the two."
            )
