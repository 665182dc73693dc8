"""``WeightCopies`` writes tensors of every kind into its targets."""

from typing import Any

import pytest
import torch
from torch import nn

from marl_collect.weights.copies import WeightCopies


def places(*tensors: torch.Tensor) -> tuple[WeightCopies, list[torch.Tensor]]:
    targets = [torch.zeros_like(t).detach().contiguous() for t in tensors]
    return WeightCopies([f"t{i}" for i in range(len(targets))], targets), targets


def write(copies: WeightCopies, tensors: list[torch.Tensor]) -> None:
    copies.read(tensors)
    copies.write(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.arange(4).to(torch.bfloat16),
        torch.arange(3, dtype=torch.int64),
        torch.arange(6.0).reshape(2, 3).T,
        nn.Parameter(torch.arange(3.0)),
        torch.arange(2.0**19),
    ],
    ids=[
        "matrix",
        "number",
        "empty",
        "bool",
        "bfloat16",
        "int64",
        "view",
        "parameter",
        "large",
    ],
)
def test_every_kind_of_tensor_is_copied_and_copied_again_after_a_change(
    tensor: torch.Tensor,
) -> None:
    copies, (target,) = places(tensor)
    write(copies, [tensor])
    assert torch.equal(target, tensor.detach())
    with torch.no_grad():
        tensor.zero_()
    write(copies, [tensor])
    assert torch.equal(target, torch.zeros_like(tensor))


def test_replaced_memory_is_read() -> None:
    weight = nn.Parameter(torch.zeros(3))
    copies, (target,) = places(weight)
    write(copies, [weight])
    weight.data = torch.ones(3)
    write(copies, [weight])
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_another_dtype_is_converted() -> None:
    copies, (target,) = places(torch.zeros(2))
    write(copies, [torch.tensor([1.0, 2.0], dtype=torch.float64)])
    assert target.dtype == torch.float32
    assert target.tolist() == [1.0, 2.0]


def test_another_shape_raises_an_error_that_names_the_tensor_and_writes_nothing() -> (
    None
):
    copies, (first, second) = places(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"'t1' must have shape \(2,\), .*\(1,\)"):
        write(copies, [torch.ones(3), torch.ones(1)])
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert second.tolist() == [0.0, 0.0]


def test_a_failed_write_does_not_affect_the_next_one() -> None:
    copies, (first, second) = places(torch.zeros(2), torch.zeros(2))
    old, new = torch.ones(2), torch.full((2,), 2.0)
    write(copies, [old, old])
    with pytest.raises(ValueError, match="'t1'"):
        write(copies, [new, torch.ones(3)])
    write(copies, [new, old])
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [1.0, 1.0]


def test_tensors_copied_by_torch_and_by_bytes_can_be_mixed() -> None:
    view = torch.arange(4.0).reshape(2, 2).T
    copies, (first, second) = places(torch.zeros(2), view)
    for _ in range(2):
        write(copies, [torch.ones(2), view])
        assert first.tolist() == [1.0, 1.0]
        assert torch.equal(second, view)
        view.add_(1.0)


def test_another_view_of_the_same_memory_is_noticed() -> None:
    weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    copies, (target,) = places(weight)
    write(copies, [weight])
    weight.data = weight.data.T
    write(copies, [weight])
    assert torch.equal(target, weight.detach())


def test_every_way_to_change_a_tensor_is_noticed() -> None:
    weight = nn.Parameter(torch.arange(8.0).reshape(2, 4), requires_grad=False)
    changes = [
        lambda: weight[1].add_(1),
        lambda: weight.data.copy_(torch.ones(2, 4)),  # Does not count as a version.
        lambda: weight.numpy().fill(5),  # Neither does this.
        lambda: setattr(weight, "data", weight.data.clone() + 1),
        lambda: weight.fill_(float("nan")),
        weight.zero_,
        lambda: weight.mul_(-1),  # -0 equals 0, but is another number.
    ]
    copies, (target,) = places(weight)
    write(copies, [weight])
    for change in changes:
        assert not copies.differ(0, 0)
        change()
        copies.read([weight])
        assert copies.differ(0, 0)
        copies.write(0, [0])
        assert torch.equal(target.view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize("other", [torch.zeros(2, 3).T, torch.zeros(3, 2).double()])
def test_tensors_that_torch_converts_are_compared(other: Any) -> None:
    copies, (target,) = places(torch.zeros(3, 2))
    copies.read([other])
    assert not copies.differ(0, 0)
    other[1, 0] = 1
    copies.read([other])
    assert copies.differ(0, 0)
    copies.write(0, [0])
    assert target[1, 0] == 1


def test_only_chosen_tensors_are_written() -> None:
    copies, (first, second) = places(torch.zeros(2), torch.zeros(2))
    copies.read([torch.ones(2), torch.ones(2)])
    copies.write(0, [1])
    assert first.tolist() == [0.0, 0.0]
    assert second.tolist() == [1.0, 1.0]
