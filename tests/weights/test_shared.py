"""Weights travel as bytes; other tests have tensors of every dtype and layout."""

import pytest
import torch
from torch import nn

from marl_collect.weights.layout import WeightLayout, check_same_weights
from marl_collect.weights.shared import WeightVector


def layout_of(**tensors: torch.Tensor) -> WeightLayout:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return WeightLayout.of(module)


def test_another_shape_or_dtype_is_an_error_that_names_the_tensor() -> None:
    layout = layout_of(first=torch.zeros(3), second=torch.zeros(2))
    layout.check([torch.ones(3), torch.ones(2)], "It")
    for other in (torch.ones(1), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^It must .*but second is .*\(2,\)"):
            layout.check([torch.ones(3), other], "It")


@pytest.mark.parametrize("size", [0, 6, 1 << 19])
def test_a_change_and_another_view_of_the_same_memory_are_written(size: int) -> None:
    weight = nn.Parameter(torch.arange(float(size)).reshape(-1, 2))
    vector = WeightVector(layout_of(weight=weight))
    transposed = weight.data.flatten().reshape(2, -1).T
    for data in (weight.data + 1, weight.data, transposed):
        weight.data = data
        slot = vector.write([weight], used=())
        assert torch.equal(vector.tensors(slot)[0], weight.detach())
    vector.close()


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (
            nn.Linear(3, 3),
            r"'weight' is torch.float32 \[3, 2\] in worker 0 and .*3, 3\]",
        ),
        (
            nn.Linear(2, 3, bias=False),
            r"'bias' is torch.float32 \[3\] .* and missing in",
        ),
        (nn.Linear(2, 3).double(), r"'bias' is torch.float32 .* and torch.float64 "),
        (None, r"'bias' is torch.float32 \[3\] in worker 0 and missing in"),
    ],
    ids=["shape", "name", "dtype", "none"],
)
def test_the_first_difference_between_two_networks_is_named(
    other: nn.Module | None, error: str
) -> None:
    layout = WeightLayout.of(nn.Linear(2, 3))
    check_same_weights(layout, WeightLayout.of(nn.Linear(2, 3)), "worker 0", "Why")
    built = None if other is None else WeightLayout.of(other)
    with pytest.raises(ValueError, match=f"^Why, so their tensors .*{error}"):
        check_same_weights(layout, built, "worker 0", "Why")
