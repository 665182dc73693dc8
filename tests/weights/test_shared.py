"""Weights travel as bytes: every kind of tensor, and each policy when it changes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from marl_collect.weights.shared import (
    WeightLayout,
    WeightPublisher,
    WeightWriter,
    check_same_weights,
)
from marl_collect.weights.skeleton import weight_tensors


def writer_of(*tensors: torch.Tensor) -> tuple[WeightWriter, list[torch.Tensor]]:
    layout = WeightLayout.plan({f"t{i}": t for i, t in enumerate(tensors)})
    vectors = [torch.zeros(layout.nbytes, dtype=torch.uint8)]
    writer = WeightWriter(layout, vectors, np.zeros((1, len(layout.ranges)), np.int64))
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
    writer.write(0, [tensor])
    assert torch.equal(target, tensor.detach())
    with torch.no_grad():
        tensor.zero_()
    writer.write(0, [tensor])
    assert torch.equal(target, torch.zeros_like(tensor))


def test_replaced_memory_is_read() -> None:
    weight = nn.Parameter(torch.zeros(3))
    writer, (target,) = writer_of(weight)
    writer.write(0, [weight])
    weight.data = torch.ones(3)
    writer.write(0, [weight])
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_another_dtype_is_converted() -> None:
    writer, (target,) = writer_of(torch.zeros(2))
    writer.write(0, [torch.tensor([1.0, 2.0], dtype=torch.float64)])
    assert target.dtype == torch.float32
    assert target.tolist() == [1.0, 2.0]


def test_another_shape_raises_an_error_that_names_the_tensor_and_writes_nothing() -> (
    None
):
    writer, (first, second) = writer_of(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"'t1' must have shape \(2,\), .*\(1,\)"):
        writer.write(0, [torch.ones(3), torch.ones(1)])
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert second.tolist() == [0.0, 0.0]


def test_a_failed_write_does_not_affect_the_next_one() -> None:
    writer, (first, second) = writer_of(torch.zeros(2), torch.zeros(2))
    old, new = torch.ones(2), torch.full((2,), 2.0)
    writer.write(0, [old, old])
    with pytest.raises(ValueError, match="'t1'"):
        writer.write(0, [new, torch.ones(3)])
    writer.write(0, [new, old])
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [1.0, 1.0]


def test_tensors_copied_by_torch_and_by_bytes_can_be_mixed() -> None:
    view = torch.arange(4.0).reshape(2, 2).T
    writer, (first, second) = writer_of(torch.zeros(2), view)
    for _ in range(2):
        writer.write(0, [torch.ones(2), view])
        assert first.tolist() == [1.0, 1.0]
        assert torch.equal(second, view)
        view.add_(1.0)


def test_another_view_of_the_same_memory_is_noticed() -> None:
    weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    writer, (target,) = writer_of(weight)
    writer.write(0, [weight])
    weight.data = weight.data.T
    writer.write(0, [weight])
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
        self.reader = self.publisher.handle.attach(self.own)
        self.layout = layout
        self.updates = 0

    def publish(self) -> list[int]:
        self.updates += 1
        tensors = self.module.state_dict(keep_vars=True)
        place = self.updates % 2
        tensors_in_order = [tensors[name] for name in self.layout.names]
        return list(self.publisher.write(place, tensors_in_order))

    def pull(self) -> list[int]:
        copied = list(self.reader.pull(self.updates % 2))
        for name, tensor in self.module.state_dict().items():
            there = self.views[name].reshape(-1).view(torch.uint8)
            assert torch.equal(there, tensor.reshape(-1).view(torch.uint8)), name
        return copied


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
    module = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    module[0].requires_grad_(False)
    layout = WeightLayout.of(module, lambda name: "policy")
    assert [part.frozen for part in layout.ranges] == [True, False]
    tensors = list(weight_tensors(module).values())
    publisher = WeightPublisher(layout)
    own = torch.zeros(layout.nbytes, dtype=torch.uint8)
    reader = publisher.handle.attach(own)
    pulled = []
    for update in range(4):
        with torch.no_grad():
            module[2].weight.add_(1)
            if update == 3:
                module[0].bias.data.add_(1)
        publisher.write(update % 2, tensors)
        pulled.append(reader.pull(update % 2))
        for view, tensor in zip(layout.views(own), tensors, strict=True):
            assert torch.equal(view, tensor)
    assert pulled == [[0, 1], [1], [1], [0, 1]]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_policy_travels_when_its_bytes_change(
    policies: Policies, change: str
) -> None:
    for _ in range(2):
        assert policies.publish() == policies.pull() == TRAVELS
    with torch.no_grad():
        CHANGES[change](policies.module["old"].weight)
    # Written to both places, read once.
    assert policies.publish() == policies.pull() == [LEARNER, OLD, BUFFERS]
    assert policies.publish() == [LEARNER, OLD, BUFFERS]
    assert policies.pull() == TRAVELS
    assert policies.publish() == policies.pull() == TRAVELS


def test_a_reader_that_skipped_updates_pulls_what_changed_meanwhile(
    policies: Policies,
) -> None:
    for name in ("old", "older"):
        policies.module[name].weight.fill_(3)
        policies.publish()
        policies.publish()
    assert policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]


def test_a_reader_that_attaches_later_pulls_everything(policies: Policies) -> None:
    policies.own.zero_()
    policies.reader = policies.publisher.handle.attach(policies.own)
    assert policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]


def test_what_a_worker_has_written_is_overwritten(policies: Policies) -> None:
    policies.views["older.weight"].fill_(7)
    policies.publish()
    assert policies.pull() == [LEARNER, OLD, OLDER, BUFFERS]


def test_an_interrupted_write_is_made_up_for(policies: Policies) -> None:
    class Interrupted(BaseException):
        pass

    class Endless(list[Any]):
        def __iter__(self) -> Any:
            raise Interrupted

    policies.module["old"].weight.fill_(3)
    pairs = policies.publisher._writer._pairs
    whole = pairs[1][BUFFERS]
    pairs[1][BUFFERS] = Endless()
    with pytest.raises(Interrupted):
        policies.publish()
    pairs[1][BUFFERS] = whole
    policies.updates -= 1
    assert policies.publish() == [LEARNER, OLD, OLDER, BUFFERS]
    assert policies.pull() == [LEARNER, OLD, BUFFERS]


@pytest.mark.parametrize(
    "source", [lambda t: t.t().contiguous().t(), torch.Tensor.double]
)
def test_frozen_tensors_that_torch_converts_are_compared(
    policies: Policies, source: Any
) -> None:
    weight = policies.module["old"].weight
    tensors = [
        source(tensor.detach()) if tensor is weight else tensor
        for tensor in (
            policies.module.state_dict(keep_vars=True)[name]
            for name in policies.layout.names
        )
    ]
    for _ in range(2):
        assert policies.publisher.write(0, tensors) == TRAVELS
    with torch.no_grad():
        tensors[policies.layout.names.index("old.weight")][1, 0] = 9
        weight[1, 0] = 9
    assert policies.publisher.write(0, tensors) == [LEARNER, OLD, BUFFERS]
    policies.updates = 0
    policies.pull()


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
