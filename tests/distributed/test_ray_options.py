"""The arguments of RayCollector are checked before Ray is started or connected."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ray_tools import biased, masked

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    PolicyPool,
    RayCollector,
)
from marl_collect.collectors import CollectorOptions, messages
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.distributed.collector import deal
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.vectors import NodeVector, StoredWeights
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.processes.shared_memory import Segment


@pytest.mark.parametrize("kind", [None, Collector, MultiSyncCollector])
def test_a_collector_class_with_the_same_batches_is_accepted(kind: Any) -> None:
    options: dict[str, Any] = {"collector_class": kind}
    with pytest.raises(ValueError, match="frames_per_batch has 3"):  # The next check.
        RayCollector(masked, frames_per_batch=[1, 2, 3], **options)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (TypeError, "takes no num_workers", {"num_workers": 2}),
        (TypeError, "takes no worker_idx", {"worker_idx": 1}),
        (TypeError, "takes no weight_sync_schemes", {"weight_sync_schemes": {}}),
        (TypeError, "Did you mean num_collectors", {"num_collector": 2}),
        (ValueError, "num_collectors must be an integer", {"num_collectors": 0}),
        (ValueError, "max_restarts must be", {"max_restarts": -2}),
        (
            TypeError,
            "num_workers_per_c.* an integer",
            {"num_workers_per_collector": True},
        ),
        (TypeError, "sync must be True or False", {"sync": "no"}),
        (TypeError, "remote_configs must be", {"remote_configs": 3}),
        (TypeError, "takes no backend", {"backend": "ray"}),
        (
            TypeError,
            "use num_workers_per_collector",
            {"collector_class": MultiAsyncCollector},
        ),
        (TypeError, "use sync=False", {"sync": True, "max_staleness": 1}),
        (TypeError, "use sync=True", {"prefetch": True}),
        (
            ValueError,
            "remote_configs has 1 entries",
            {"num_collectors": 2, "remote_configs": [{}]},
        ),
        (ValueError, "frames_per_batch has 3", {"frames_per_batch": [1, 2, 3]}),
    ],
)
def test_invalid_arguments_are_refused(
    error: type[Exception], match: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        RayCollector(masked, None, **({"frames_per_batch": 10} | options))


@pytest.mark.parametrize("configs", [[], [{}, {}], [{}] * 4])
def test_a_list_of_ray_options_fits_the_actors(configs: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=f"has {len(configs)} entries, .* 3 actors"):
        RayCollector([masked] * 3, frames_per_batch=10, remote_configs=configs)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray is started"))


@pytest.mark.usefixtures("no_ray")
def test_options_that_ray_refuses_are_named_before_it_is_started() -> None:
    configs: Any = [{}, {"bogus": 1}]
    with pytest.raises(ValueError, match="remote_configs of actor 1: .*bogus"):
        RayCollector([masked] * 2, frames_per_batch=20, remote_configs=configs)


@pytest.mark.usefixtures("no_ray")
def test_factories_that_cannot_be_pickled_are_named_before_ray_is_started() -> None:
    locked = partial(masked, threading.Lock())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="environments of actor 1 cannot be pickled"):
        RayCollector([masked, locked], frames_per_batch=20)


def test_an_environment_instead_of_a_factory_is_refused() -> None:
    with pytest.raises(TypeError, match="create_env_fn"):
        RayCollector(masked(), frames_per_batch=10)  # type: ignore[arg-type]


def options_of(**options: Any) -> RayOptions:
    return RayOptions(**{"frames_per_batch": 100, **options})


def test_factories_are_assigned_to_actors_and_their_workers() -> None:
    a, b, c, d = (lambda: 0), (lambda: 1), (lambda: 2), (lambda: 3)
    assert deal([a, b], None, options_of()) == [[a], [b]]
    two_workers = options_of(num_workers_per_collector=2)
    assert deal([a, b, c, d], None, two_workers) == [[a], [b], [c], [d]]
    assert deal([a, b], 2, two_workers) == [[a], [a], [b], [b]]
    assert deal(a, 3, options_of(envs_per_worker=2)) == [[a, a]] * 3
    assert deal(a, None, two_workers) == [[a], [a]]


def test_the_number_of_frames_equals_that_of_one_collector() -> None:
    """With 3 actors of 7 environments each, 100 frames are 5 of each environment."""
    together, asynchronous = options_of(sync=True), options_of(sync=False)
    assert together.frames_of_workers([7, 7, 7]) == [-(-100 // 21)] * 3
    assert asynchronous.frames_of_workers([7, 7, 3]) == [15, 15, 34]
    listed = options_of(frames_per_batch=[10, 20], num_workers_per_collector=2)
    assert listed.frames_of_workers([2, 2, 3, 3]) == [3, 3, 4, 4]


class Store:
    """An object store that notes the sizes of what is put there."""

    def __init__(self) -> None:
        self.put_bytes: list[int] = []
        self.objects: dict[object, np.ndarray] = {}

    def put(self, array: np.ndarray) -> object:
        reference = object()
        self.objects[reference] = array.copy()
        self.put_bytes.append(array.nbytes)
        return reference

    def get(self, references: list[object], timeout: float) -> list[np.ndarray]:
        assert timeout > 0
        return [self.objects[reference] for reference in references]


def stored_weights(policy: TrainerPolicy, store: Store, workers: int) -> StoredWeights:
    def ask(*_: Any) -> list[Any]:
        raise AssertionError("The trainer has the weights.")

    options = CollectorOptions(frames_per_batch=1)
    return StoredWeights(policy, options, [None] * workers, store, ask)


def sent(weights: messages.Weights) -> list[tuple[int, int]]:
    """Return the ranges of the vector that are sent with an order."""
    if weights.handle is None:
        return []
    assert isinstance(weights.handle, NodeVector)
    assert len(weights.handle.references) == len(weights.handle.ranges)
    return list(weights.handle.ranges)


def test_weights_are_stored_once_and_sent_only_where_they_are_new() -> None:
    store = Store()
    weights = stored_weights(TrainerPolicy(biased(1.0)), store, 2)
    for index in range(2):
        command = weights.policy_for(index)
        assert isinstance(command, messages.SkeletonPolicy)
    assert len(store.put_bytes) == 1
    assert sent(weights.order(0)) == []

    weights.publish([torch.tensor(5.0)])
    orders = [weights.order(index) for index in range(2)]
    complete = sent(orders[0])
    assert len(store.put_bytes) == 2
    assert complete == sent(orders[1]) == [(0, store.put_bytes[0])]
    assert [order.version for order in orders] == [1, 1]
    assert weights.order(0).place is None  # The worker has them.

    weights.publish([torch.tensor(6.0)], [1])
    assert weights.versions() == [1, 2]
    assert [sent(weights.order(index)) for index in range(2)] == [[], complete]
    biases = [state["module.bias"].item() for state in weights.weights()]
    assert biases == [5, 6]

    weights.publish([torch.tensor(7.0)])
    assert weights.versions() == [3, 3]
    assert [sent(weights.order(index)) for index in range(2)] == [complete, complete]


def test_a_restarted_worker_repeats_its_order_and_gets_everything_again() -> None:
    weights = stored_weights(TrainerPolicy(biased(1.0)), Store(), 2)
    weights.policy_for(0)
    weights.publish([torch.tensor(5.0)])
    assert weights.order(0).version == 1
    weights.publish([torch.tensor(6.0)])  # Prefetched while the worker collects.
    vector = weights.policy_for(0)
    assert isinstance(vector, messages.SkeletonPolicy)
    repeated = weights.order_again(0)
    assert repeated.version == 1
    assert sent(repeated)
    assert weights.order(0).version == 2
    weights.forget(0)
    assert weights.order_again(0).version == 2


def test_a_version_of_a_pool_is_stored_and_sent_once() -> None:
    store = Store()
    net = biased(1.0).requires_grad_()
    pool = PolicyPool(net, size=8)
    module = AssignedPolicies({"main": net, "past": pool}, lambda _, agents: {})
    policy = TrainerPolicy(module)
    weights = stored_weights(policy, store, 2)
    # "main", each version, and the pool's results.
    layout = policy.layout
    assert layout is not None
    ranges = [(span.begin, span.end) for span in layout.ranges]
    assert len(store.put_bytes) == len(ranges) == 10
    for index in range(2):
        weights.policy_for(index)

    def update() -> list[int]:
        store.put_bytes.clear()
        weights.publish(policy.tensors())
        indices = [ranges.index(span) for span in sent(weights.order(0))]
        assert len(store.put_bytes) == len(indices)
        return indices

    assert update() == [0, 9]
    with torch.no_grad():
        net.module.bias.fill_(3)
    pool.update()  # At place 1.
    assert update() == [0, 2, 9]
    assert update() == [0, 9]
    with torch.no_grad():
        pool.members[6].module.bias.data.fill_(4)
    assert update() == [0, 7, 9]
    # A worker that missed some updates gets what changed in any of them.
    late = [ranges.index(span) for span in sent(weights.order(1))]
    assert late == [0, 2, 7, 9]


def test_a_reader_copies_the_vector_and_publishes_its_own() -> None:
    policy = TrainerPolicy(biased(1.0))
    layout = policy.layout
    assert layout is not None
    segment = Segment.create(layout.nbytes, "A test")
    memory = np.frombuffer(segment.buffer, np.uint8)
    vector = torch.full((layout.nbytes,), 3, dtype=torch.uint8)
    reader = NodeVector(layout, memory=segment.handle).attach(vector)
    memory[:] = 7
    reader.pull(0, [0])
    assert (vector == 7).all()
    vector.fill_(9)
    reader.publish_own()
    assert (memory == 9).all()
