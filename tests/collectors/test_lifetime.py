"""An unreferenced collector ends at once instead of at the next garbage collection."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import psutil
import pytest
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    SerialEnv,
)
from marl_collect.models import make_policy

MODES = [
    (Collector, {}),
    (MultiSyncCollector, {}),
    (MultiSyncCollector, {"prefetch": True}),
    (MultiSyncCollector, {"on_worker_failure": "restart"}),
    (MultiAsyncCollector, {}),
]
every_mode = pytest.mark.parametrize(("kind", "options"), MODES)


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every_mode
@pytest.mark.parametrize("acting", [False, True])
def test_a_collector_ends_with_its_last_reference(
    kind: Any, options: dict[str, Any], acting: bool
) -> None:
    policy = make_policy(CountingEnv(), num_cells=(4,)) if acting else None
    collector = kind([CountingEnv] * 2, policy, frames_per_batch=20, **options)
    for k, _ in enumerate(collector):
        if acting:
            collector.update_policy_weights_()
        if k == 2:
            break
    collector.state_dict()
    collector.stats()
    pids = getattr(collector, "worker_pids", ())
    alive = weakref.ref(collector)
    del collector
    assert alive() is None
    assert not any(map(psutil.pid_exists, pids))


@every_mode
def test_an_iterator_keeps_its_collector_alive(
    kind: Any, options: dict[str, Any]
) -> None:
    collector = kind([CountingEnv] * 2, frames_per_batch=20, **options)
    alive = weakref.ref(collector)
    batches = iter(collector)
    del collector
    batch = next(batches)
    before = batch.clone()
    assert alive() is not None
    del batches
    assert alive() is None
    assert (batch == before).all()  # Still valid after the collector.


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_batches_of_environments_end_with_their_last_reference(kind: Any) -> None:
    env = kind(3, partial(CountingEnv, deaths=False))
    env.rollout(4)
    pids = env.engine().pids if kind is ParallelEnv else ()
    alive = weakref.ref(env)
    del env
    assert alive() is None
    assert not any(map(psutil.pid_exists, pids))


COPIES = [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_collector_is_true_and_cannot_be_copied(kind: Any) -> None:
    with kind([CountingEnv], frames_per_batch=20) as collector:
        assert collector
        with pytest.raises(TypeError, match="has no length"):
            len(collector)
        whole = {"trajs_per_batch": 2, "total_frames": 40}
        with (
            kind([CountingEnv], frames_per_batch=20, **whole) as other,
            pytest.raises(TypeError, match="trajs_per_batch has no length"),
        ):
            len(other)
        for make_copy in COPIES:
            with pytest.raises(TypeError, match=rf"A {kind.__name__} cannot be copied"):
                make_copy(collector)
        assert collector.next().numel() == 20


def test_batches_of_environments_cannot_be_copied() -> None:
    with contextlib.closing(ParallelEnv(2, CountingEnv)) as env:
        for make_copy in COPIES:
            with pytest.raises(TypeError, match="A ParallelEnv cannot be copied"):
                make_copy(env)
        assert env.rollout(3).numel() == 6
