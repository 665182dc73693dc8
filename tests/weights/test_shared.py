"""Weights travel as bytes: every kind of tensor, to places that nobody reads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from marl_collect.weights.layout import WeightLayout, check_same_weights
from marl_collect.weights.shared import WeightVector, mapped


@pytest.fixture
def opened() -> Iterator[list[WeightVector]]:
    """Vectors that are closed after the test."""
    vectors: list[WeightVector] = []
    yield vectors
    for vector in vectors:
        vector.close()


def layout_of(**tensors: torch.Tensor) -> WeightLayout:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return WeightLayout.of(module)


class Copies:
    """Writes tensors, and reads them again as a worker does."""

    def __init__(self, opened: list[WeightVector], *tensors: torch.Tensor) -> None:
        self.layout = layout_of(**{f"t{i}": t for i, t in enumerate(tensors)})
        self.vector = WeightVector(self.layout)
        opened.append(self.vector)
        self.bytes = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.own = self.layout.views(self.bytes)

    def write(self, *tensors: torch.Tensor, used: Any = ()) -> int:
        return self.vector.write(tensors, used)

    def read(self, place: int) -> list[torch.Tensor]:
        self.bytes.copy_(mapped(self.vector.handle(place)))
        for mine, published in zip(self.own, self.vector.tensors(place), strict=True):
            assert torch.equal(mine, published)
        return self.own


TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(4).to(torch.bfloat16),
    "int64": torch.arange(3, dtype=torch.int64),
    "view": torch.arange(6.0).reshape(2, 3).T,
    "parameter": nn.Parameter(torch.arange(3.0)),
    "large": torch.arange(2.0**19),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_is_copied_and_copied_again_after_a_change(
    name: str, opened: list[WeightVector]
) -> None:
    tensor = TENSORS[name]
    copies = Copies(opened, tensor)
    assert torch.equal(copies.read(copies.write(tensor))[0], tensor.detach())
    with torch.no_grad():
        tensor.zero_()
    assert not copies.read(copies.write(tensor))[0].any()


def test_another_shape_or_dtype_is_an_error_that_names_the_tensor() -> None:
    layout = layout_of(first=torch.zeros(3), second=torch.zeros(2))
    layout.check([torch.ones(3), torch.ones(2)], "It")
    for other in (torch.ones(1), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^It must .*but second is .*\(2,\)"):
            layout.check([torch.ones(3), other], "It")


def test_another_view_of_the_same_memory_is_noticed(opened: list[WeightVector]) -> None:
    weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    copies = Copies(opened, weight)
    copies.write(weight)
    weight.data = weight.data.T
    assert torch.equal(copies.read(copies.write(weight))[0], weight.detach())


def test_a_place_that_is_used_is_never_written(opened: list[WeightVector]) -> None:
    copies = Copies(opened, torch.zeros(2))
    numbers = [torch.full((2,), float(n)) for n in range(6)]
    assert copies.write(numbers[0]) == 0
    assert copies.write(numbers[1], used={0}) == 1
    assert copies.write(numbers[2], used={0, 1}) == 2
    assert copies.write(numbers[3], used={0, 2}) == 1
    assert copies.write(numbers[4], used={1, 2}) == 0
    assert [copies.read(place)[0][0].item() for place in range(3)] == [4, 3, 2]


def test_a_worker_publishes_its_own_weights(opened: list[WeightVector]) -> None:
    copies = Copies(opened, torch.zeros(2))
    copies.own[0].fill_(7)

    def call(method: str, place: int, handle: Any, workers: list[int]) -> None:
        assert (method, workers) == ("publish_weights", [3])
        mapped(handle).copy_(copies.bytes)

    copies.write(torch.zeros(2))
    place = copies.vector.filled(call, 3)
    copies.own[0].zero_()
    assert place == 1
    assert copies.read(place)[0].tolist() == [7.0, 7.0]


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
