"""The arguments of RayCollector are checked before Ray is started or connected."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray_tools import biased, masked

from marl_collect import Collector, PolicyPool, RayCollector
from marl_collect.collectors import CollectorOptions
from marl_collect.collectors.multi_sync import SyncBackend
from marl_collect.collectors.single import SingleBackend
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.specs import Specs, packed
from marl_collect.distributed.vectors import StoredWeights, changed
from marl_collect.policies.assigned import AssignedPolicies


def test_options_of_actors_are_options_of_collectors() -> None:
    sent = RayOptions(frames_per_batch=10, check_actions=True, timeout=9).sent()
    assert sent["check_actions"] is True
    assert sent["timeout"] == 9
    assert not {"frames_per_batch", "seed", "prefetch", "sync"} & set(sent)
    assert CollectorOptions(frames_per_batch=10, **sent).check_actions


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
        (ValueError, "collector_class must be", {"collector_class": dict}),
        (
            ValueError,
            "envs_per_worker",
            {"collector_class": Collector, "num_workers_per_collector": 2},
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


def test_an_environment_instead_of_a_factory_is_refused() -> None:
    with pytest.raises(TypeError, match="create_env_fn"):
        RayCollector(masked(), frames_per_batch=10)  # type: ignore[arg-type]


def specs_of(create_env_fn: Any, **options: Any) -> Specs:
    return Specs(create_env_fn, RayOptions(**{"frames_per_batch": 100, **options}))


def test_factories_are_assigned_to_actors_and_their_workers() -> None:
    a, b, c, d = (lambda: 0), (lambda: 1), (lambda: 2), (lambda: 3)
    assert specs_of([a, b]).factories == [[a], [b]]
    both = {"num_workers_per_collector": 2}
    assert specs_of([a, b, c, d], **both).factories == [[a, b], [c, d]]
    each = {"num_collectors": 2, **both}
    assert specs_of([a, b], **each).factories == [[a, a], [b, b]]
    assert specs_of(a, num_collectors=3, envs_per_worker=2).factories == [[a, a]] * 3


def test_the_number_of_frames_equals_that_of_one_collector() -> None:
    """With 3 actors of 7 environments each, 100 frames are 5 of each environment."""
    specs = specs_of(masked, num_collectors=3, envs_per_worker=7, sync=True)
    spec = specs.spec(0, specs.factories[0], 0)
    assert spec.kind is SingleBackend
    assert -(-spec.keywords["frames_per_batch"] // 7) == -(-100 // 21) == 5
    alone = specs_of(masked, num_collectors=3, num_workers_per_collector=2)
    spec = alone.spec(1, alone.factories[1], 0)
    assert spec.kind is SyncBackend
    assert (spec.worker, spec.keywords["frames_per_batch"]) == (2, 100)


def test_objects_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(TypeError, match="policy of actor 1 cannot be pickled"):
        packed((number for number in (1, 2)), "actor 1")


def test_weights_are_stored_once_and_sent_only_where_they_are_new() -> None:
    put: list[np.ndarray] = []

    def store(vector: np.ndarray) -> object:
        put.append(vector.copy())
        return object()

    policy = TrainerPolicy(biased(1.0))
    vectors = StoredWeights(SimpleNamespace(put=store), policy, lambda: [0, 1], 2)
    assert vectors.of(0) == []
    vectors.begin()
    put.clear()
    vectors.publish([torch.tensor(5.0)])
    first = vectors.of(0)
    assert len(put) == 1
    assert put[0][:4].view(np.float32) == 5
    assert first == vectors.of(1) == [first[0]] * 2
    assert changed([None, None], first) == [(None, first[0], [0])]
    assert changed(first, vectors.of(0)) == []

    vectors.publish([torch.tensor(6.0)], [2])
    assert vectors.versions() == [1, 1, 2, 1]
    assert vectors.of(0) == first
    own = vectors.of(1)
    assert own[1] is first[0] is not own[0]
    assert changed(first, own) == [((0,), own[0], [0])]
    assert changed([None, None], own) == [((0,), own[0], [0]), ((1,), own[1], [0])]

    vectors.publish([torch.tensor(7.0)])
    assert vectors.versions() == [3] * 4
    assert vectors.of(1) == vectors.of(0) != first
    assert changed(own, vectors.of(1)) == [(None, vectors.of(1)[0], [0])]


def test_a_version_of_a_pool_is_stored_and_sent_once() -> None:
    put: list[int] = []

    def store(part: np.ndarray) -> object:
        put.append(part.nbytes)
        return object()

    net = biased(1.0).requires_grad_()
    pool = PolicyPool(net, size=8)
    module = AssignedPolicies({"main": net, "past": pool}, lambda _, agents: {})
    policy = TrainerPolicy(module)
    vectors = StoredWeights(SimpleNamespace(put=store), policy, lambda: [0], 1)
    vectors.begin()
    # "main", each version, and the pool's results.
    assert len(put) == len(vectors.parts) == 10
    begun = vectors.of(0)

    def update() -> tuple[int, list[int]]:
        before = vectors.of(0)
        put.clear()
        vectors.publish(policy.tensors())
        ((_, _, sent),) = changed(before, vectors.of(0))
        assert len(put) == len(sent)
        return len(put), sent

    assert update() == (2, [0, 9])
    with torch.no_grad():
        net.module.bias.fill_(3)
    pool.update()  # At place 1.
    assert update() == (3, [0, 2, 9])
    assert update() == (2, [0, 9])
    with torch.no_grad():
        pool.members[6].module.bias.data.fill_(4)
    assert update() == (3, [0, 7, 9])
    # An actor that missed some updates gets what changed in any of them.
    assert changed(begun, vectors.of(0))[0][2] == [0, 2, 7, 9]
    assert changed([None], vectors.of(0))[0][2] == list(range(10))
