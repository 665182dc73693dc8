"""Collectors with processes, and the weights that they send to these."""

from functools import partial
from typing import Any

import pytest
import torch
from conformance_tools import (
    ACTION,
    IDS,
    LENGTH,
    OBSERVATION,
    Implementation,
    forked,
    times,
    weight_policy,
    with_value,
)

pytestmark = pytest.mark.processes


class Running:
    """Two workers of one environment each, and what they have collected so far."""

    def __init__(self, implementation: Any, kind: str, **options: Any) -> None:
        self.policy = weight_policy()
        options = {"frames_per_batch": 12, "total_frames": -1, **options}
        make = getattr(implementation, kind)
        self.asynchronous = kind == "MultiAsyncCollector"
        with forked():
            self.collector = make(2 * [implementation.make()], self.policy, **options)
            self._batches = iter(self.collector)
            self.batch = self.next()
        self.batches = [self.batch]

    def next(self) -> Any:
        """Return a copy of the next batch."""
        self.batch = next(self._batches).clone()
        return self.batch

    def next_with(self, action: int) -> Any:
        """Return the next batch with this action; older ones may come before."""
        for _ in range(6):
            self.next()
            if (self.batch[ACTION] == action).all() or not self.asynchronous:
                break
        return self.batch

    def close(self) -> None:
        self.collector.shutdown()


@pytest.fixture(params=["MultiSyncCollector", "MultiAsyncCollector"])
def running(request: Any, implementation: Any, shared: Any) -> Running:
    """Return running workers, shared by the tests of a kind."""
    running: Running = shared(Running, implementation, request.param)
    return running


class Asked(Running):
    """The same, for questions to workers that collect meanwhile.

    They may be the end of it: TorchRL's asynchronous workers drop a batch if they were
    asked something while they collected it, and then wait for an order to collect.
    """


@pytest.fixture(params=["MultiSyncCollector", "MultiAsyncCollector"])
def asked(request: Any, implementation: Any, shared: Any) -> Asked:
    """Return further workers, of which nobody expects another batch."""
    asked: Asked = shared(Asked, implementation, request.param)
    return asked


def two_batches(implementation: Implementation, **options: Any) -> list[Any]:
    """Return what MultiSync collects first with these options."""
    running = Running(implementation, "MultiSyncCollector", **options)
    collected = [running.batch, running.next()]
    running.close()
    return collected


@pytest.fixture
def sync(implementation: Any, shared: Any) -> Any:
    """Return a function that gives two batches with these options of MultiSync."""
    return partial(shared, two_batches, implementation)


@pytest.mark.parametrize("dim", [0, -1])
def test_batches_of_workers_may_be_concatenated(sync: Any, dim: int) -> None:
    (batch, _) = sync(cat_results=dim, frames_per_batch=11)  # Rounded up per worker.
    assert batch.shape == (12,)
    assert times(batch).tolist() == 2 * [0, 1, 2, 3, 4, 0]


def test_workers_go_on_where_they_were_in_a_stack(sync: Any) -> None:
    batch, next_batch = sync(cat_results="stack")
    assert batch.shape == next_batch.shape == (2, 6)
    assert batch.names[-1] == "time"
    assert times(batch).tolist() == 2 * [[0, 1, 2, 3, 4, 0]]
    assert times(next_batch).tolist() == 2 * [[1, 2, 3, 4, 0, 1]]
    assert torch.equal(
        batch["next", *OBSERVATION][:, -1], next_batch[OBSERVATION][:, 0]
    )


def test_ids_are_unique_over_workers_and_batches(sync: Any) -> None:
    frames = torch.cat(sync(cat_results="stack"), 1)
    changes = frames[IDS][:, 1:] != frames[IDS][:, :-1]
    assert torch.equal(changes, frames["next", "done"][:, :-1, 0])
    assert len(frames[IDS].unique()) == 2 * 3


def test_workers_may_have_different_numbers_of_frames(sync: Any) -> None:
    (batch, _) = sync(frames_per_batch=(4, 8), cat_results=0)
    assert batch.shape == (12,)
    assert times(batch).tolist() == [*range(4), *range(LENGTH), *range(3)]


def test_an_asynchronous_batch_is_one_worker_s(running: Running) -> None:
    if not running.asynchronous:
        assert running.batch.numel() == 12
        return
    batch = running.next()
    assert batch.numel() == 12
    steps = times(batch).flatten()
    assert ((steps[1:] - steps[:-1]) % LENGTH == 1).all()


def test_new_weights_reach_the_workers(running: Running) -> None:
    for value in (2.0, 3.0):
        with torch.no_grad():
            for parameter in running.policy.parameters():
                parameter.fill_(value)
        running.collector.update_policy_weights_()
        assert (running.next_with(int(value))[ACTION] == int(value)).all()


def test_weights_may_be_given(running: Running) -> None:
    running.collector.update_policy_weights_(with_value(2.0))
    assert (running.next_with(2)[ACTION] == 2).all()


def test_weights_given_twice_are_an_error(running: Running) -> None:
    with pytest.raises((ValueError, TypeError)):
        running.collector.update_policy_weights_(
            weights=with_value(2.0), policy=weight_policy(3.0)
        )


@pytest.mark.torchrl_defect("D13")
def test_optimisers_alone_reach_no_worker(running: Running) -> None:
    running.collector.update_policy_weights_(with_value(1.0))
    running.next_with(1)
    with torch.no_grad():
        for parameter in running.policy.parameters():
            parameter.fill_(0.0)
    batches = [running.next() for _ in range(4)]
    if running.asynchronous:
        # A slow worker may still deliver a batch with earlier weights, but none was 0.
        assert all((batch[ACTION] != 0).all() for batch in batches)
        batches = [running.next_with(1)]
    assert all((batch[ACTION] == 1).all() for batch in batches)


def test_a_frame_that_terminated_is_also_truncated_at_the_end(sync: Any) -> None:
    (batch, _) = sync(set_truncated=True, frames_per_batch=2 * LENGTH)
    assert batch["next", "terminated"][:, -1].all()
    assert batch["next", "truncated"][:, -1].all()


def test_a_state_has_an_entry_per_worker(asked: Asked) -> None:
    state = asked.collector.state_dict()
    assert {"worker0", "worker1"} <= set(state)
    assert "policy_state_dict" in state["worker0"]


def test_statistics_may_be_by_worker(implementation: Any, asked: Asked) -> None:
    if implementation.name == "torchrl" and not hasattr(asked.collector, "stats"):
        pytest.skip("needs a TorchRL that has this option")
    assert asked.collector.stats(workers="per_worker")
