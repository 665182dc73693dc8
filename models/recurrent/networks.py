"""``MultiAgentGRU`` and ``MultiAgentLSTM``, for single steps and for sequences."""

import abc
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from marl_collect.models.base import (
    FEATURES,
    SIZE,
    AgentNetworks,
    copy_into,
    named_tensors,
)
from marl_collect.models.layers.cells import Cell, GRUCell, LSTMCell, States
from marl_collect.models.layers.linear import StackedLinear
from marl_collect.models.layers.stacking import is_hooked
from marl_collect.models.recurrent.gru import run_gru
from marl_collect.options import require


class _Mode(threading.local):
    """Whether inputs are sequences, per thread: a collecting thread keeps single steps.

    Not a ``ContextVar``, because ``torch.compile`` does not notice when one changes.
    """

    def __init__(self) -> None:
        self.sequences = False


_mode = _Mode()


@contextmanager
def set_recurrent_mode(mode: bool = True) -> Iterator[None]:
    """Treat inputs as sequences ``[*B, T, ...]`` within the block, as losses need.

    Outside of the block they are single steps ``[*B, ...]``, as in collection.

    Example:
        >>> with set_recurrent_mode(True):
        ...     loss = loss_module(batch)  # doctest: +SKIP
    """
    before = _mode.sequences
    _mode.sequences = mode
    try:
        yield
    finally:
        _mode.sequences = before


def reads_sequences() -> bool:
    """Whether inputs are currently sequences; see ``set_recurrent_mode``."""
    return _mode.sequences


class MultiAgentRecurrent(AgentNetworks, abc.ABC):
    """Base class of ``MultiAgentGRU`` and ``MultiAgentLSTM``.

    With ``L`` layers and ``H`` units, a single step maps ``[*B, n_agents, inputs]`` to
    ``[*B, n_agents, H]``. A sequence of ``T`` steps is ``[*B, T, n_agents, inputs]``. A
    state is ``[*B, n_agents, L, H]``.
    """

    cell_class: type[Cell]
    state_names: tuple[str, ...]

    def __init__(
        self,
        n_agent_inputs: int | None,
        hidden_size: int,
        n_agents: int,
        *,
        centralised: bool | None = None,
        share_params: bool | None = None,
        num_layers: int = 1,
        device: torch.device | str | None = None,
        centralized: bool | None = None,
    ) -> None:
        super().__init__(
            n_agents=n_agents,
            centralised=centralised,
            share_params=share_params,
            centralized=centralized,
        )
        self.n_features: int | None = require(
            "n_agent_inputs", n_agent_inputs, int | None, FEATURES
        )
        self.hidden_size: int = require("hidden_size", hidden_size, int, SIZE)
        self.num_layers: int = require("num_layers", num_layers, int, SIZE)
        self.net = self._build(device)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one environment's state: ``(n_agents, num_layers, hidden_size)``."""
        return (self.n_agents, self.num_layers, self.hidden_size)

    def load_torchrl_state_dict(
        self, state_dict: Mapping[str, Tensor], agent: int | None = None
    ) -> None:
        """Copy the weights of TorchRL's or torch's recurrent modules.

        Args:
            state_dict: state of a ``GRUModule``, ``LSTMModule``, ``nn.GRU`` or
                ``nn.LSTM``, with keys like ``gru.weight_ih_l0``.
            agent: agent whose network is replaced, because these modules contain a
                single network; ``None`` if all agents share one.

        Raises:
            ValueError: if names or shapes differ (lists the differences), or if
                ``agent`` is missing.
        """
        self._check_known("load_torchrl_state_dict()")
        if agent is None and not self.share_params:
            raise ValueError(
                "TorchRL's recurrent modules contain a single network, but here each "
                "agent has its own: pass the agent, such as agent=0."
            )
        values = {_our_name(key): value for key, value in state_dict.items()}
        single = self.get_stateful_net(None if self.share_params else agent)
        copy_into(named_tensors(single), values, "TorchRL's state_dict")

    def _build_single_net(
        self, *, device: torch.device | str | None, **_: Any
    ) -> nn.Module:
        n_inputs = self.n_features
        if n_inputs is not None and self.centralised:
            n_inputs *= self.n_agents
        inputs = [n_inputs] + [self.hidden_size] * (self.num_layers - 1)
        cells = [self.cell_class(size, self.hidden_size, device) for size in inputs]
        return nn.ModuleList(cells)

    def _run(
        self,
        x: Tensor,
        states: tuple[Tensor | None, ...],
        is_init: Tensor | None,
        sequence: bool | None,
    ) -> tuple[Tensor, ...]:
        """Return the output and the states after each step of ``x``."""
        if torch.is_autocast_enabled(x.device.type):
            # States keep the weights' dtype, as the written-out gradient needs.
            dtype = next(self.parameters(), x).dtype
            states = tuple(s if s is None else s.to(dtype) for s in states)
            with torch.autocast(x.device.type, enabled=False):
                return self._run(x.to(dtype), states, is_init, sequence)
        sequence = reads_sequences() if sequence is None else sequence
        lead = self._check(x, states, is_init, sequence=sequence)
        rows, steps = math.prod(lead), x.shape[len(lead)] if sequence else 1
        keep = None
        if is_init is not None:
            keep = (~is_init).to(x.dtype).reshape(rows, steps, 1).transpose(0, 1)
        # Below, tensors are [agents, steps, rows, features], with a single agent if all
        # agents share the network and its input.
        before = [self._agents_first(state, rows, x) for state in states]
        features = x.reshape(rows, steps, *x.shape[-2:]).permute(2, 1, 0, 3)
        if self.centralised:
            features = features.permute(1, 2, 0, 3).flatten(-2).unsqueeze(0)
        if self.n_features is None:
            self._infer_inputs(features)
            self.n_features = x.shape[-1]
        visited: list[States] = []
        for index, cell in enumerate(self.net.children()):
            first = tuple(state[..., index, :] for state in before)
            visited.append(_run_cell(cell, features, first, keep))
            features = visited[-1][0]
        shape = (*lead, steps) if sequence else lead
        out = self._batch_first(features).reshape(*shape, *self.state_shape[::2])
        after = [
            torch.stack([self._batch_first(kind) for kind in kinds], -2)
            for kinds in zip(*visited, strict=True)
        ]
        return (out, *(state.reshape(*shape, *self.state_shape) for state in after))

    def _infer_inputs(self, features: Tensor) -> None:
        """If the first layer is lazy, infer its size and initialise its weights."""
        cell = next(self.net.children())
        if any(is_lazy(p) for p in cell.parameters()):
            cell.input(features[:, :1].flatten(1, 2))  # type: ignore[operator]
            # A lazy linear layer has initialised its weights as a linear layer does.
            cell.reset_parameters()  # type: ignore[operator]

    def _agents_first(self, state: Tensor | None, rows: int, x: Tensor) -> Tensor:
        identical = self.share_params and self.centralised
        if state is None:
            n_agents = 1 if identical else self.n_agents
            return x.new_zeros(n_agents, rows, *self.state_shape[1:])
        state = state.reshape(rows, *self.state_shape).transpose(0, 1)
        return state[:1] if identical else state

    def _batch_first(self, x: Tensor) -> Tensor:
        x = x.permute(2, 1, 0, 3)
        return x.expand(*x.shape[:2], self.n_agents, x.shape[-1])

    def _check(
        self,
        x: Tensor,
        states: tuple[Tensor | None, ...],
        is_init: Tensor | None,
        *,
        sequence: bool,
    ) -> torch.Size:
        """Check the shapes of the inputs; return the batch dimensions without time."""
        name, last = type(self).__name__, 3 if sequence else 2
        shape = "[*B, T, n_agents, inputs]" if sequence else "[*B, n_agents, inputs]"
        size = self.n_features
        if (
            x.ndim < last
            or x.shape[-2] != self.n_agents
            or (size is not None and x.shape[-1] != size)
        ):
            raise ValueError(
                f"{name} expected an input {shape} with n_agents={self.n_agents} and "
                f"inputs={size or 'any number'}, but found the shape {list(x.shape)}."
            )
        # None inside TorchRL's losses with tensordict before 0.12, which set tensors.
        weight = next(self.net.parameters(), None)
        if weight is not None and (weight.device, weight.dtype) != (x.device, x.dtype):
            raise ValueError(
                f"{name} has dtype {weight.dtype} on the device {weight.device}, but "
                f"its input has dtype {x.dtype} on {x.device}. Move one of them with "
                ".to(). If the network is on meta, call materialize() or use "
                "collector.policy."
            )
        lead = x.shape[:-last]
        for state in states:
            if state is not None and state.shape != (*lead, *self.state_shape):
                raise ValueError(
                    f"{name} expected a state of shape "
                    f"{[*lead, *self.state_shape]}: [*B, n_agents, num_layers, "
                    f"hidden_size], but found {list(state.shape)}."
                )
        expected = (*x.shape[:-2], 1)
        if is_init is not None and is_init.shape != expected:
            raise ValueError(
                f"{name} expected is_init of shape {list(expected)}, but found "
                f"{list(is_init.shape)}."
            )
        return lead


@final
class MultiAgentGRU(MultiAgentRecurrent):
    """Gated recurrent units: one network per agent, or a shared one.

    Each network is equal to an ``nn.GRU`` with the same weights.

    Args:
        n_agent_inputs: features of one agent; ``None`` infers them from an input.
        hidden_size: number of units, and of outputs, of one agent.
        n_agents: number of agents.
        centralised: whether each agent sees the inputs of all agents.
        share_params: whether all agents share one network.
        num_layers: number of stacked layers.
        device: device of the weights; ``"meta"`` costs no memory.
        centralized: the same as ``centralised``.

    Example:
        >>> gru = MultiAgentGRU(5, 32, 3, centralised=False, share_params=False)
        >>> out, hidden = gru(torch.zeros(10, 3, 5))
        >>> out.shape, hidden.shape
        (torch.Size([10, 3, 32]), torch.Size([10, 3, 1, 32]))
    """

    pure_forward = True
    by_row = MultiAgentRecurrent.is_shared_and_decentralised

    cell_class = GRUCell
    state_names = ("recurrent_state",)

    def forward(
        self,
        x: Tensor,
        hidden: Tensor | None = None,
        is_init: Tensor | None = None,
        *,
        sequence: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute one step, or a sequence.

        Args:
            x: ``[*B, n_agents, inputs]``, or ``[*B, T, n_agents, inputs]``.
            hidden: state before the first step, ``[*B, n_agents, num_layers, H]``;
                ``None`` is zeros.
            is_init: True where an episode begins, which resets the state to zeros:
                bool, ``[*B, 1]`` or ``[*B, T, 1]``.
            sequence: whether ``x`` is a sequence; ``None`` follows
                ``set_recurrent_mode``.

        Returns:
            The output ``[*B, (T,) n_agents, H]``, and the state after each step,
            ``[*B, (T,) n_agents, num_layers, H]``.

        Raises:
            ValueError: if shapes are inconsistent.
        """
        out, after = self._run(x, (hidden,), is_init, sequence)
        return out, after


@final
class MultiAgentLSTM(MultiAgentRecurrent):
    """Long short-term memory: one network per agent, or a shared one.

    Each network is equal to an ``nn.LSTM`` with the same weights. It takes the
    arguments of ``MultiAgentGRU``. The state has two parts, ``hidden`` and ``cell``.
    """

    pure_forward = True
    by_row = MultiAgentRecurrent.is_shared_and_decentralised

    cell_class = LSTMCell
    state_names = ("recurrent_state_h", "recurrent_state_c")

    def forward(
        self,
        x: Tensor,
        hidden: Tensor | None = None,
        cell: Tensor | None = None,
        is_init: Tensor | None = None,
        *,
        sequence: bool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one step, or a sequence; see ``MultiAgentGRU.forward``.

        Returns:
            The output, and both parts of the state after each step.
        """
        out, hidden_after, cell_after = self._run(x, (hidden, cell), is_init, sequence)
        return out, hidden_after, cell_after


def _our_name(key: str) -> str:
    """Convert a tensor name of ``nn.GRU`` or ``nn.LSTM`` to the name in a ``Cell``."""
    match = re.search(r"(weight|bias)_(ih|hh)_l(\d+)$", key)
    if match is None:
        return key
    kind, part, layer = match.groups()
    return f"{layer}.{'input' if part == 'ih' else 'hidden'}.{kind}"


def _run_cell(
    cell: nn.Module, x: Tensor, states: States, keep: Tensor | None
) -> States:
    """Run ``[agents, steps, rows, features]`` through a cell; return all its states."""
    steps, rows = x.shape[1:3]
    if _is_plain_gru(cell, x):
        return (_run_gru(cell, x, states[0], keep),)
    # A single product for the inputs of all steps; only the states are sequential.
    projected = cell.input(x.flatten(1, 2)).unflatten(1, (steps, rows))  # type: ignore[operator]
    visited: list[States] = []
    # The gradient of projected[:, step] has the size of all steps, so indexing would
    # make training quadratic in their number; that of unbind() is one stack.
    resets = keep.unbind(0) if keep is not None else ()
    for step, features in enumerate(projected.unbind(1)):
        if keep is not None:
            states = tuple(state * resets[step] for state in states)
        states = cell(features, states)
        visited.append(states)
    return tuple(torch.stack(kind, 1) for kind in zip(*visited, strict=True))


def _is_plain_gru(cell: Any, x: Tensor) -> bool:
    """Return whether ``run_gru`` computes what the cell's modules do, step by step."""
    hidden = cell.hidden
    return (
        x.shape[1] > 1
        and type(cell) is GRUCell
        and type(hidden) in (nn.Linear, StackedLinear)
        and not any(is_hooked(layer) for layer in (cell, hidden))
        # Compilers and torch.func see through the modules, but not the gradient.
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public name
    )


def _run_gru(cell: Any, x: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:
    """Run ``[agents, steps, rows, features]`` through a GRU's cell, time first."""
    agents, steps, rows, _ = x.shape
    weight, bias = cell.hidden.weight, cell.hidden.bias
    if weight.ndim == 3:
        projected = cell.input(x.flatten(1, 2)).unflatten(1, (steps, rows))
        keep = None if keep is None else keep.unsqueeze(1)
        out = run_gru(projected.transpose(0, 1), state, keep, weight, bias)
        return out.transpose(0, 1)
    # With shared weights, agents are rows.
    projected = cell.input(x.transpose(0, 1).flatten(1, 2))
    if keep is not None:
        keep = keep.repeat(1, agents, 1)
    out = run_gru(projected, state.flatten(0, 1), keep, weight.mT, bias)
    return out.unflatten(1, (agents, rows)).transpose(0, 1)
