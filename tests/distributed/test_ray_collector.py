"""RayCollector has the data and the methods of local collectors."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray_tools import (
    SHARED,
    assert_same,
    biased,
    environments,
    masked,
    slow,
    train,
)
from workloads.counting import CountingEnv, Fault

from marl_collect import Collector, RayCollector

pytest_plugins = ["support.ray_cluster"]
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def pair(cluster: Any) -> Iterator[RayCollector]:
    """For tests that depend on nothing that other tests may have changed."""
    # Two actors with two environments each, which fill one batch.
    with RayCollector(
        masked,
        biased(),
        num_collectors=2,
        envs_per_worker=2,
        sync=True,
        frames_per_batch=60,
        **SHARED,
    ) as collector:
        yield collector


def test_a_state_can_be_loaded_into_ray_and_local_collectors(
    pair: RayCollector,
) -> None:
    pair.update_policy_weights_()  # The same for all workers.
    pair.next()
    state = pair.state_dict()
    expected = [pair.next().clone() for _ in range(2)]
    pair.load_state_dict(state)
    for batch in expected:
        actual = pair.next()
        assert_same(actual, batch)
    with Collector(
        [masked] * 2, biased(), frames_per_batch=30, worker_idx=1, **SHARED
    ) as local:
        half = {**state, "workers": state["workers"][1:]}
        local.load_state_dict(half)
        for batch in expected:
            actual = local.next()
            assert_same(actual, batch[2:])


def test_a_held_batch_stays_and_may_be_written_to(pair: RayCollector) -> None:
    pair.set_seed(1)
    batch = pair.next()
    copy = batch.clone()
    batch["next", "hunter", "reward"].add_(1)
    for _ in range(3):
        assert pair.next()["next", "hunter", "reward"].data_ptr() != (
            batch["next", "hunter", "reward"].data_ptr()
        )
    assert (
        batch["next", "hunter", "reward"] == copy["next", "hunter", "reward"] + 1
    ).all()
    assert (batch["hunter", "action"] == copy["hunter", "action"]).all()


def test_attributes_of_environments_and_policies_can_be_read(
    pair: RayCollector,
) -> None:
    assert [len(actor) for actor in pair.getattr_env("description")] == [2, 2]
    images = pair.call_env("render", environments=[1, 3])
    assert [image.ndim for image in images] == [3, 3]
    assert len(pair.explain()) == 2
    assert pair.steps_so_far() >= pair.frames
    with pytest.raises(AttributeError, match="colour"):
        pair.getattr_env("colour")
    pair.next()  # A wrong name does not affect the actors.


def test_the_number_of_actors_is_chosen_at_the_start(pair: RayCollector) -> None:
    for name in ("add_collectors", "remove_collectors"):
        with pytest.raises(AttributeError, match="build another collector"):
            getattr(pair, name)


def test_a_slow_actor_is_preempted() -> None:
    with RayCollector(
        [masked, partial(slow, 1.0)],  # Its whole batch would take 200 seconds.
        sync=True,
        frames_per_batch=400,
        preemptive_threshold=0.5,
        compact_obs=True,
        **SHARED,
    ) as collector:
        batch = collector.next()
        valid = batch["collector", "mask"]
        assert valid[0].all()
        frames = int(valid[1].sum())
        assert 0 < frames < 200
        assert valid[1, :frames].all()
        assert (batch["collector", "traj_ids"][1, frames:] == -1).all()
        assert collector.frames == 200 + frames
        # The last observations before the cut are stored separately.
        last = batch["collector"].get_non_tensor("last_observations")
        assert frames - 1 in last.frames[last.rows == 1].tolist()
        # The next batch continues after the cut.
        following = collector.next()["collector", "traj_ids"]
        assert int(following[1, 0]) - int(batch["collector", "traj_ids"][1, 0]) >= 0


def waiting_in_each_batch(folder: Path, frames: int) -> CountingEnv:
    """Wait in the middle of batch k for the file k, or for the file "all"."""
    steps = 0

    def wait() -> None:
        nonlocal steps
        batch, step = divmod(steps, frames)
        steps += 1
        files = [folder / f"{batch}", folder / "all"]
        while step == frames // 2 and not any(file.exists() for file in files):
            threading.Event().wait(0.005)

    return masked(Fault(wait, repeat=True))


def test_the_first_actor_that_is_done_delivers_first(tmp_path: Path) -> None:
    """Actor 0 waits in each of its batches until actor 1 is two batches ahead."""
    order: list[int] = []
    with RayCollector(
        [partial(waiting_in_each_batch, tmp_path, 20), masked],
        biased(),
        sync=False,
        frames_per_batch=20,
        max_staleness=2,
        **SHARED,
    ) as collector:
        batches = []
        for version in range(8):
            batch = collector.next()
            behind = version - batch["policy_version"]
            assert ((behind >= 0) & (behind <= 2)).all()
            assert (batch["hunter", "bias"][..., 0] == batch["policy_version"]).all()
            batches.append(batch.clone())
            order += environments(batch)
            if order.count(1) == order.count(0) + 2:
                (tmp_path / f"{order.count(0)}").touch()
            del batch
            train(collector)
        (tmp_path / "all").touch()
        state = collector.state_dict()
        expected = {environments(b)[0]: b.clone() for b in _until_both(collector)}
        collector.load_state_dict(state)
        for batch in _until_both(collector):
            ids = ("collector", "traj_ids")
            expected_batch = expected.pop(environments(batch)[0], None)
            if expected_batch is not None:  # The unfinished batch is collected again.
                assert (batch[ids] == expected_batch[ids]).all()
    assert order.count(1) > order.count(0) > 0
    for index in (0, 1):
        actor_batches = [batch for batch in batches if environments(batch)[0] == index]
        actual = torch.cat(
            [batch["collector", "traj_ids"] for batch in actor_batches], 1
        )
        assert (actual.diff() >= 0).all()
        assert int(actual[0, 0]) == index << 32


def test_workers_of_an_actor_fill_async_batches_together() -> None:
    with RayCollector(
        masked,
        biased(),
        num_collectors=2,
        num_workers_per_collector=2,
        sync=False,
        frames_per_batch=20,
        **SHARED,
    ) as collector:
        groups: set[tuple[int, ...]] = set()
        while len(groups) < 2:  # A slow actor is overtaken any number of times.
            batch = collector.next()
            assert batch.batch_size == (2, 10)
            groups.add(tuple(environments(batch)))
            del batch
        with pytest.raises(NotImplementedError, match="before the first"):
            collector.fake_tensordict()
    assert groups == {(0, 1), (2, 3)}


def _until_both(collector: RayCollector) -> list[Any]:
    batches: dict[int, Any] = {}
    while len(batches) < 2:
        batch = collector.next()
        batches.setdefault(environments(batch)[0], batch.clone())
        del batch
    return list(batches.values())


def failing_at_close() -> CountingEnv:
    return masked(Fault("raise", "close"))


def test_an_error_in_close_names_the_worker() -> None:
    collector = RayCollector(
        [masked, failing_at_close], sync=False, frames_per_batch=20, **SHARED
    )
    collector.next()
    with pytest.warns(RuntimeWarning, match="(?i)while closing: worker 1 "):
        collector.shutdown()


def mapped(actor: int) -> int:
    """Return the number of shared memories that an actor and its workers map."""
    processes = [psutil.Process(actor), *psutil.Process(actor).children(recursive=True)]
    maps = [m.path for p in processes for m in p.memory_maps(grouped=False)]
    return sum("memfd:marl_collect" in path for path in maps)


@pytest.mark.filterwarnings("ignore:More than . batches are held")
def test_actors_release_the_memory_of_slots_too() -> None:
    with RayCollector([masked], sync=True, frames_per_batch=8, **SHARED) as collector:
        pid = collector.actors[0]["pid"]
        for _ in range(5):
            collector.next()
        before = mapped(pid)
        batches = [collector.next() for _ in range(6)]
        assert mapped(pid) >= before + 8  # Of a worker and of its actor.
        del batches
        for _ in range(100):
            collector.next()
        assert collector.stats()["slots"] == 2
        assert mapped(pid) == before
        assert len([collector.next() for _ in range(6)]) == 6
