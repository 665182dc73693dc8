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
    RayCollector,
)
from marl_collect.collectors import CollectorOptions, messages
from marl_collect.collectors.publish import WorkerWeights
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.collectors.worker_policy import WorkerPolicy
from marl_collect.distributed.collector import deal
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.vectors import RayVector
from marl_collect.processes.shared_memory import Segment
from marl_collect.rollout.episodes import Plan
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.skeleton import split_module


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
        (TypeError, "num_workers_per_c.* integer", {"num_workers_per_collector": True}),
        (TypeError, "sync must be True or False", {"sync": "no"}),
        (TypeError, "remote_configs must be", {"remote_configs": 3}),
        (TypeError, "takes no backend", {"backend": "ray"}),
        (TypeError, "use num_workers_per", {"collector_class": MultiAsyncCollector}),
        (TypeError, "use sync=False", {"sync": True, "max_staleness": 1}),
        (TypeError, "use sync=True", {"prefetch": True}),
        (ValueError, "frames_per_batch has 3", {"frames_per_batch": [1, 2, 3]}),
    ],
)
def test_invalid_arguments_are_refused(
    error: type[Exception], match: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        RayCollector(masked, None, **({"frames_per_batch": 10} | options))


@pytest.mark.parametrize("configs", [[], [{}], [{}, {}], [{}] * 4])
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


def options_of(create_env_fn: Any = masked, **options: Any) -> RayOptions:
    return RayOptions(create_env_fn, **{"frames_per_batch": 100, **options})


def dealt(create_env_fn: Any, actors: int | None, **options: Any) -> Any:
    return deal(options_of(create_env_fn, num_collectors=actors, **options))


def test_factories_are_assigned_to_actors_and_their_workers() -> None:
    a, b, c, d = (lambda: 0), (lambda: 1), (lambda: 2), (lambda: 3)
    assert dealt([a, b], None) == [[a], [b]]
    two: Any = {"num_workers_per_collector": 2}
    assert dealt([a, b, c, d], None, **two) == [[a], [b], [c], [d]]
    assert dealt([a, b], 2, **two) == [[a], [a], [b], [b]]
    assert dealt(a, 3, envs_per_worker=2) == [[a, a]] * 3
    assert dealt(a, None, **two) == [[a], [a]]


def test_the_number_of_frames_equals_that_of_one_collector() -> None:
    """With 3 actors of 7 environments each, 100 frames are 5 of each environment."""
    together, asynchronous = options_of(sync=True), options_of(sync=False)
    assert together.frames_of_workers([7, 7, 7]) == [-(-100 // 21)] * 3
    assert asynchronous.frames_of_workers([7, 7, 3]) == [15, 15, 34]
    listed = options_of(frames_per_batch=[10, 20], num_workers_per_collector=2)
    assert listed.frames_of_workers([1, 3, 4, 2]) == [3, 3, 4, 4]


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

    def get(self, reference: object, timeout: float) -> np.ndarray:
        assert timeout > 0
        return self.objects[reference]


def stored_weights(policy: TrainerPolicy, store: Store, workers: int) -> WorkerWeights:
    options = CollectorOptions(masked, frames_per_batch=1)
    open_vector = partial(RayVector, ray=store)
    return WorkerWeights(policy, options, workers, open_vector, lambda _: 0)


def sent(weights: messages.Weights) -> object:
    """Return the reference that is sent with an order."""
    return None if weights.handle is None else weights.handle.reference


def test_weights_are_stored_once_and_sent_only_where_they_are_new() -> None:
    store = Store()
    weights = stored_weights(TrainerPolicy(biased(1.0)), store, 2)
    for index in range(2):
        command = weights.policy_for(index)
        assert isinstance(command, messages.SkeletonPolicy)
    assert len(store.put_bytes) == 1
    assert sent(weights.order(0)) is None
    weights.publish(([torch.tensor(5.0)], None))
    orders = [weights.order(index) for index in range(2)]
    assert len(store.put_bytes) == 2
    assert sent(orders[0]) is sent(orders[1]) is not None
    assert [order.version for order in orders] == [1, 1]
    assert weights.order(0).weights_slot is None  # The worker has them.
    weights.publish(([torch.tensor(6.0)], [1]))
    assert weights.versions() == [1, 2]
    orders = [weights.order(index) for index in range(2)]
    assert sent(orders[0]) is None
    assert sent(orders[1]) is list(store.objects)[2]
    biases = [state["module.bias"].item() for state in weights.weights()]
    assert biases == [5, 6]
    weights.publish(([torch.tensor(7.0)], None))
    assert weights.versions() == [3, 3]
    newest = list(store.objects)[3]
    assert [sent(weights.order(index)) for index in range(2)] == [newest, newest]


def test_weights_that_no_worker_needs_are_dropped() -> None:
    weights = stored_weights(TrainerPolicy(biased(1.0)), Store(), 2)
    for number in range(5):
        weights.publish(([torch.tensor(float(number))], [number % 2]))
        weights.order(0)
    vector: Any = weights._vector
    assert len(vector._references) <= 3
    weights.close()
    assert not vector._references


def test_a_reader_has_one_vector_on_its_node_and_publishes_its_own() -> None:
    module = biased(1.0)
    layout = WeightLayout.of(module)
    segment = Segment.create(layout.nbytes, "A test")
    memory = np.frombuffer(segment.buffer, np.uint8)
    sent = messages.SkeletonPolicy(split_module(module), layout, segment.handle, 0)
    reader = WorkerPolicy(sent, [], Plan(0, range(1)))
    for value in (4, 9):
        memory[:] = value
        reader.use(messages.Weights(weights_slot=0, handle=segment.handle))
        assert (reader._vector == value).all()
    reader._vector.fill_(2)
    reader.publish(0, segment.handle)
    assert (memory == 2).all()
