"""``MultiAgentAttention``: a network over the set of a group's agents."""

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.models.base import FEATURES, MultiAgentNetBase
from marl_collect.models.layers.inputs import Leaf
from marl_collect.models.layers.stacking import run_layers
from marl_collect.models.mlp import LayerFactory, hidden_sizes, mlp
from marl_collect.options import Option, require

ATTENTION: Final[Literal["attention"]] = "attention"
"""The name of this network in ``make_policy(network=...)``."""
ENDED: Final = "terminated"
"""Name in a group of the flag of agents that others do not attend to."""


@final
class MultiAgentAttention(MultiAgentNetBase):
    """Maps ``[*B, n_agents, n_agent_inputs]`` to ``[*B, n_agents, n_agent_outputs]``.

    Each agent's inputs are encoded by hidden layers. With ``centralised=True`` every
    agent then attends to the codes of all agents, by scaled products of queries and
    keys. A last linear layer maps its code and the sum of what it attends to, weighted
    by softmax, to its outputs. Deep Sets are the special case of equal weights, which
    queries of zero give.

    With ``share_params=True`` the outputs of permuted agents are the permuted outputs.
    Agents that are absent do not change the outputs of others, so a group may have
    different numbers of agents over time. With ``share_params=False`` agent i's outputs
    are those of network i, applied to all agents. With ``centralised=False`` each agent
    attends to itself alone.

    Args:
        n_agent_inputs: features of one agent; ``None`` infers them from an input.
        n_agent_outputs: outputs of one agent.
        n_agents: number of agents.
        centralised: whether each agent sees the inputs of all agents.
        share_params: whether all agents share one network.
        device: device of the weights; ``"meta"`` costs no memory.
        num_cells: units of the hidden layers; the last number is the size of codes.
        activation_class: builds the activation after each hidden layer.
        num_heads: products by which an agent attends, each to its part of the codes.
        absent: index of the input feature that is not 0 for an agent that is absent,
            to which no other agent attends. ``None``: all agents are present.
        centralized: the same as ``centralised``.

    Raises:
        TypeError: if ``centralised`` or ``share_params`` is missing.
        ValueError: if a layer has no units, or if ``num_heads`` does not divide the
            size of codes.

    Sources:
        Vaswani et al., "Attention Is All You Need", 2017 (arXiv 1706.03762);
        Zaheer et al., "Deep Sets", 2017 (arXiv 1703.06114).
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
        num_cells: Sequence[int] = (64, 64),
        activation_class: LayerFactory = nn.Tanh,
        num_heads: int = 1,
        absent: int | None = None,
        centralized: bool | None = None,
    ) -> None:
        cells = hidden_sizes(None, num_cells)
        require("num_heads", num_heads, int, Option("", at_least=1))
        if not cells or cells[-1] % num_heads:
            raise ValueError(
                f"num_cells must end with a multiple of num_heads={num_heads}, the "
                f"size of an agent's code, but is {list(cells)}."
            )
        self.num_heads = num_heads
        self.absent = absent
        super().__init__(
            n_agents=n_agents,
            centralised=centralised,
            share_params=share_params,
            centralized=centralized,
            device=device,
            n_inputs=require("n_agent_inputs", n_agent_inputs, int | None, FEATURES),
            n_outputs=require("n_agent_outputs", n_agent_outputs, int, FEATURES),
            cells=cells,
            activation=activation_class,
        )
        self.n_features = n_agent_inputs

    @override
    def _build_single_net(
        self, *, device: torch.device | str | None, **kwargs: Any
    ) -> nn.Module:
        *cells, code = kwargs["cells"]
        encode = mlp(
            kwargs["n_inputs"],
            code,
            cells,
            activation=(kwargs["activation"], None),
            activate_last_layer=True,
            device=device,
        )
        # Queries, keys and values.
        project = nn.Linear(code, 3 * code, device=device)
        decode = nn.Linear(2 * code, kwargs["n_outputs"], device=device)
        return nn.ModuleList([encode, project, decode])

    @override
    def _shared(self, x: Tensor, dim: int) -> Tensor:
        lead = x.shape[:dim]
        x = x.reshape(math.prod(lead), *x.shape[dim:])
        encode, project, decode = self._layers
        codes = run_layers(encode, x)
        queries, keys, values = project(codes).chunk(3, -1)
        if self.centralised:
            values = self._attend(queries, keys, values, self._visible(x))
        out: Tensor = decode(torch.cat([codes, values], -1))
        return out.reshape(*lead, *out.shape[1:])

    @override
    def _unshared(self, x: Tensor, dim: int) -> Tensor:
        lead, n = x.shape[:dim], self.n_agents
        x = x.reshape(math.prod(lead), *x.shape[dim:])
        rows = x.shape[0]
        encode, project, decode = self._layers
        if self.centralised:
            # Each network reads all agents, and answers for its own.
            codes = run_layers(encode, x.reshape(1, rows * n, x.shape[-1]))
            queries, keys, values = (
                projected.unflatten(1, (rows, n))
                for projected in project(codes).chunk(3, -1)
            )
            visible = self._visible(x).transpose(0, 1).unsqueeze(-2)
            query = _of_itself(queries).unsqueeze(-2)
            values = self._attend(query, keys, values, visible).squeeze(-2)
            codes = _of_itself(codes.unflatten(1, (rows, n)))
        else:
            codes = run_layers(encode, x.transpose(0, 1))
            values = project(codes).chunk(3, -1)[2]
        out: Tensor = decode(torch.cat([codes, values], -1)).transpose(0, 1)
        return out.reshape(*lead, *out.shape[1:])

    @property
    def _layers(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        encode, project, decode = self.net.children()
        return encode, project, decode

    def _visible(self, x: Tensor) -> Tensor:
        """Return who attends to whom, bool ``[rows, n_agents, n_agents]``.

        An agent always attends to itself, so that its weights are defined.
        """
        n = self.n_agents
        itself = torch.eye(n, dtype=torch.bool, device=x.device)
        if self.absent is None:
            return torch.ones_like(itself).expand(x.shape[0], n, n)
        return (x[..., self.absent] == 0).unsqueeze(-2) | itself

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> Tensor:
        """Return the weighted sums of values, ``[*, queries, code]``.

        Args:
            queries: ``[*, queries, code]``.
            keys: ``[*, n_agents, code]``.
            values: ``[*, n_agents, code]``.
            visible: bool ``[*, queries, n_agents]``.
        """
        queries, keys, values = (
            tensor.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for tensor in (queries, keys, values)
        )
        scores = queries @ keys.mT / math.sqrt(keys.shape[-1])
        scores = scores.masked_fill(~visible.unsqueeze(-3), -math.inf)
        return (scores.softmax(-1) @ values).transpose(-2, -3).flatten(-2)


def _of_itself(values: Tensor) -> Tensor:
    """Of ``[n_agents, rows, n_agents, size]``, return each network's own agent.

    Returns:
        ``[n_agents, rows, size]``.
    """
    return values.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def flag_leaf(group: str) -> Leaf:
    """Return the flag of absent agents as an array that networks read."""
    return Leaf((group, ENDED), (1,), "vector", 1)
