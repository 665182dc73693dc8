"""Weights travel as bytes: every kind of tensor, and each policy when it changes."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from marl_collect.collectors.broadcaster import SharedVector
from marl_collect.weights.layout import WeightLayout, check_same_weights, lacking
from marl_collect.weights.shared import WeightPublisher, WeightWriter
from marl_collect.weights.skeleton import weight_tensors


def writer_of(*tensors: torch.Tensor) -> tuple[WeightWriter, list[torch.Tensor]]:
    layout = WeightLayout.plan({f"t{i}": t for i, t in enumerate(tensors)})
    writer = WeightWriter(layout, [torch.zeros(layout.nbytes, dtype=torch.uint8)])
    return writer, writer.places[0]


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
    writer, (target,) = writer_of(tensor)
    writer.write(0, [tensor], [0])
    assert torch.equal(target, tensor.detach())
    with torch.no_grad():
        tensor.zero_()
    writer.write(0, [tensor], [0])
    assert torch.equal(target, torch.zeros_like(tensor))


def test_replaced_memory_is_read() -> None:
    weight = nn.Parameter(torch.zeros(3))
    writer, (target,) = writer_of(weight)
    writer.write(0, [weight], [0])
    weight.data = torch.ones(3)
    writer.write(0, [weight], [0])
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_another_shape_or_dtype_is_an_error_that_names_the_tensor() -> None:
    layout = WeightLayout.plan({"first": torch.zeros(3), "second": torch.zeros(2)})
    layout.check([torch.ones(3), torch.ones(2)], "It")
    for other in (torch.ones(1), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^It must .*but second is .*\(2,\)"):
            layout.check([torch.ones(3), other], "It")


def test_tensors_copied_by_torch_and_by_bytes_can_be_mixed() -> None:
    view = torch.arange(4.0).reshape(2, 2).T
    writer, (first, second) = writer_of(torch.zeros(2), view)
    for _ in range(2):
        writer.write(0, [torch.ones(2), view], [0])
        assert first.tolist() == [1.0, 1.0]
        assert torch.equal(second, view)
        view.add_(1.0)


def test_another_view_of_the_same_memory_is_noticed() -> None:
    weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    writer, (target,) = writer_of(weight)
    writer.write(0, [weight], [0])
    weight.data = weight.data.T
    writer.write(0, [weight], [0])
    assert torch.equal(target, weight.detach())


CHANGES = {
    "in place": lambda weight: weight[1].add_(1),
    "data": lambda weight: weight.data.copy_(torch.ones(2, 4)),  # Not counted by torch.
    "numpy": lambda weight: weight.numpy().fill(5),  # Nor is this.
    "memory": lambda weight: setattr(weight, "data", weight.data.clone() + 1),
    "nan": lambda weight: weight.fill_(float("nan")),
    "zeros": lambda weight: weight.zero_(),
    "sign of zero": lambda weight: weight.zero_().mul_(-1),
    "one bit": lambda weight: weight.view(torch.int32)[1, 3].add_(1),
}


class Policies:
    """A trained policy, and two frozen ones with buffers, published and pulled."""

    def __init__(self) -> None:
        self.module = nn.ModuleDict(
            {name: nn.BatchNorm1d(4) for name in ("learner", "old", "older")}
        )
        for name in ("old", "older"):
            weight = nn.Parameter(torch.arange(8.0).reshape(2, 4), requires_grad=False)
            self.module[name].weight = weight
            self.module[name].bias.requires_grad_(False)
        layout = WeightLayout.of(self.module, lambda name: name.split(".")[0])
        self.own = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.views = dict(zip(layout.names, layout.views(self.own), strict=True))
        self.publisher = WeightPublisher(layout)
        self.vector = SharedVector(self.publisher, layout, itertools.count())
        self.reader = self.publisher.handle.attach(self.own)
        self.layout = layout
        self.has: tuple[int, ...] = ()

    def weight(self, name: str) -> Any:
        return self.module[name].weight

    def publish(self, tensors: Sequence[torch.Tensor] | None = None) -> list[int]:
        """Return the ranges that are written."""
        by_name = self.module.state_dict(keep_vars=True)
        place = self.vector.replaced
        in_order = [by_name[name] for name in self.layout.names]
        self.vector.write(tensors or in_order, 0, None)
        numbers = self.vector.newest.numbers
        return list(lacking(numbers, place.numbers if place else ()))

    def pull(self) -> list[int]:
        """Return the ranges that are copied."""
        newest = self.vector.newest
        ranges = lacking(newest.numbers, self.has)
        self.reader.pull(newest.place, ranges)
        self.has = newest.numbers
        for name, tensor in self.module.state_dict().items():
            there = self.views[name].reshape(-1).view(torch.uint8)
            assert torch.equal(there, tensor.reshape(-1).view(torch.uint8)), name
        return list(ranges)


LEARNER, OLD, OLDER, BUFFERS = range(4)  # The ranges of the layout.
TRAVELS = [LEARNER, BUFFERS]


@pytest.fixture
def policies() -> Policies:
    policies = Policies()
    assert policies.publish() == policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]
    assert policies.publish() == [LEARNER, OLD, OLDER, BUFFERS]  # The other place.
    assert policies.pull() == TRAVELS
    return policies


def test_frozen_parameters_of_a_policy_are_one_range_of_bytes(
    policies: Policies,
) -> None:
    ranges = policies.layout.ranges
    assert [part.frozen for part in ranges] == [False, True, True, False]
    assert [part.begin for part in ranges[1:]] == [part.end for part in ranges[:-1]]
    assert ranges[-1].end == policies.layout.nbytes
    names = [policies.layout.names[part.tensors] for part in ranges]
    assert names[OLD] == ("old.weight", "old.bias")
    assert names[BUFFERS][0] == "learner.running_mean"
    whole = WeightLayout.of(policies.module).ranges
    assert [part.frozen for part in whole] == [False]
    assert whole[0].end == policies.layout.nbytes


def test_a_frozen_encoder_travels_once() -> None:
    encoder, head = nn.Linear(8, 64), nn.Linear(64, 2)
    encoder.requires_grad_(False)
    module = nn.Sequential(encoder, nn.BatchNorm1d(64), head)
    layout = WeightLayout.of(module, lambda name: "policy")
    assert [part.frozen for part in layout.ranges] == [True, False]
    tensors = list(weight_tensors(module).values())
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    numbers: tuple[int, ...] = ()
    travels = []
    for update in range(4):
        with torch.no_grad():
            head.weight.add_(1)
            if update == 3:
                encoder.bias.data.add_(1)
        before, numbers = numbers, layout.renumber(tensors, views, numbers, update)
        travels.append(lacking(numbers, before))
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor.detach())
    assert travels == [(0, 1), (1,), (1,), (0, 1)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_policy_travels_when_its_bytes_change(
    policies: Policies, change: str
) -> None:
    for _ in range(2):
        assert policies.publish() == policies.pull() == TRAVELS
    with torch.no_grad():
        CHANGES[change](policies.weight("old"))
    # Written to both places, read once.
    assert policies.publish() == policies.pull() == [LEARNER, OLD, BUFFERS]
    assert policies.publish() == [LEARNER, OLD, BUFFERS]
    assert policies.pull() == TRAVELS
    assert policies.publish() == policies.pull() == TRAVELS


def test_a_reader_that_skipped_updates_pulls_what_changed_meanwhile(
    policies: Policies,
) -> None:
    for name in ("old", "older"):
        policies.weight(name).fill_(3)
        policies.publish()
        policies.publish()
    assert policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]


def test_a_reader_that_attaches_later_pulls_everything(policies: Policies) -> None:
    policies.own.zero_()
    policies.reader = policies.publisher.handle.attach(policies.own)
    policies.has = ()
    assert policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]


def test_an_interrupted_write_is_made_up_for(policies: Policies) -> None:
    class Interrupted(BaseException):
        pass

    class Endless(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise Interrupted

    policies.weight("old").fill_(3)
    writer = policies.publisher._writer
    assert policies.vector.replaced is not None
    place = policies.vector.replaced.place
    whole, writer._targets[place] = writer._targets[place], Endless()
    with pytest.raises(Interrupted):
        policies.publish()
    writer._targets[place] = whole
    assert policies.publish() == [LEARNER, OLD, OLDER, BUFFERS]
    assert policies.pull() == [LEARNER, OLD, BUFFERS]


@pytest.mark.parametrize(
    "source",
    [lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0]],
)
def test_frozen_tensors_that_are_not_contiguous_are_compared(
    policies: Policies, source: Any
) -> None:
    weight = policies.weight("old")
    tensors = [
        source(tensor.detach()) if tensor is weight else tensor
        for tensor in (
            policies.module.state_dict(keep_vars=True)[name]
            for name in policies.layout.names
        )
    ]
    for _ in range(2):
        assert policies.publish(tensors) == TRAVELS
    with torch.no_grad():
        tensors[policies.layout.names.index("old.weight")][1, 0] = 9
        weight[1, 0] = 9
    assert policies.publish(tensors) == [LEARNER, OLD, BUFFERS]
    assert policies.pull() == [LEARNER, OLD, BUFFERS]


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
