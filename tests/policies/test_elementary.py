"""Elementary operations give what torch's functions give."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from marl_collect.policies.fused.elementary import ElementaryOperations
from marl_collect.policies.fused.record import OperationObserver, TensorOp

KINDS: Any = pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
TORCHS = {"mkldnn_rnn_layer", "unsafe_split", "unsafe_chunk", "sigmoid_"}
"""What torch's functions run, and elementary operations do not."""


def states(net: Any, rows: int) -> Any:
    shape = (net.num_layers * (2 if net.bidirectional else 1), rows, net.hidden_size)
    h, c = torch.randn(shape), torch.randn(shape)
    return h if isinstance(net, nn.GRU) else (h, c)


def flat(result: Any) -> list[torch.Tensor]:
    out, after = result
    out = out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out
    return [out, *(after if isinstance(after, tuple) else (after,))]


class Names(OperationObserver):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def ran(self, operation: TensorOp) -> None:
        self.names.add(operation.name)


def check(net: Any, x: Any, *arguments: Any, replaced: bool) -> None:
    """Compare the results, and check that the operations are or are not torch's."""
    with torch.no_grad():
        torch.manual_seed(1)
        expected = flat(net(x, *arguments))
        torch.manual_seed(1)
        with ElementaryOperations(), Names() as observer:
            result = net(x, *arguments)
    for ours, theirs in zip(flat(result), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert replaced != bool(observer.names & TORCHS), observer.names


@KINDS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_is_elementary(kind: Any, bias: bool, layers: int, rows: int) -> None:
    torch.manual_seed(0)
    for batch_first, with_state in itertools.product((True, False), repeat=2):
        net = kind(6, 16, layers, bias=bias, batch_first=batch_first)
        x = torch.randn(rows, 1, 6) if batch_first else torch.randn(1, rows, 6)
        check(net, x, *([states(net, rows)] if with_state else []), replaced=True)


@KINDS
@pytest.mark.parametrize(
    ("steps", "options"),
    [(2, {}), (1, {"bidirectional": True}), (1, {"dropout": 0.5, "num_layers": 2})],
    ids=["two steps", "both directions", "dropout"],
)
def test_other_calls_are_left_to_torch(
    kind: Any, steps: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    net = kind(3, 4, batch_first=True, **options)
    check(net, torch.randn(5, steps, 3), states(net, 5), replaced=False)


@KINDS
def test_packed_sequences_are_left_to_torch(kind: Any) -> None:
    torch.manual_seed(0)
    net = kind(3, 4)
    packed = pack_sequence([torch.randn(1, 3), torch.randn(1, 3)])
    check(net, packed, states(net, 2), replaced=False)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
def test_projections_are_left_to_torch() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(3, 4, proj_size=2, batch_first=True)
    kv = (torch.randn(1, 5, 2), torch.randn(1, 5, 4))
    check(net, torch.randn(5, 1, 3), kv, replaced=False)
