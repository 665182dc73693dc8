"""Recurrent networks on sequences: ours, and torch's for all agents as one batch.

A row is a forward and a backward pass over 8 sequences of 3 agents, with 31 inputs and
64 units. All agents share the network. Torch's has the same weights and no resets
within a sequence, so it runs in one call. Ours gets the resets of episodes that begin.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from harness.turns import Alternative
from torch import Tensor, nn

from cases.case import Case
from marl_collect.models import MultiAgentGRU, MultiAgentLSTM

INPUTS, UNITS, AGENTS, SEQUENCES = 31, 64, 3, 8
STEPS = (50, 200, 500)
KINDS = {"GRU": (MultiAgentGRU, nn.GRU), "LSTM": (MultiAgentLSTM, nn.LSTM)}


def build(stack: ExitStack, kind: str, steps: int) -> dict[str, Alternative]:
    """Return both alternatives of a row."""
    stack.enter_context(torch.enable_grad())
    ours_class, torchs_class = KINDS[kind]
    ours = ours_class(INPUTS, UNITS, AGENTS, centralised=False, share_params=True)
    torchs = torchs_class(INPUTS, UNITS, batch_first=True)
    ours.load_torchrl_state_dict(torchs.state_dict())
    x = torch.randn(SEQUENCES, steps, AGENTS, INPUTS)
    is_init = torch.rand(SEQUENCES, steps, 1) < 0.02
    rows = x.transpose(1, 2).flatten(0, 1)
    return {
        "ours": Alternative.once(
            partial(train, ours, lambda: ours(x, is_init=is_init, sequence=True)[0])
        ),
        "torch": Alternative.once(partial(train, torchs, lambda: torchs(rows)[0])),
    }


def train(network: nn.Module, forward: Callable[[], Tensor]) -> None:
    """Run a forward and a backward pass."""
    network.zero_grad()
    forward().square().mean().backward()


def cases() -> list[Case]:
    """Return a row per network and length of the sequences."""
    return [
        Case(f"training, {kind}, {steps} steps", partial(build, kind=kind, steps=steps))
        for kind in KINDS
        for steps in STEPS
    ]
