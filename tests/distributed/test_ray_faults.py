"""Lost actors and nodes, which are really killed: results and leftovers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_tools import (
    SHARED,
    DiesOnce,
    assert_same,
    biased,
    environments,
    hanging,
    kill,
    masked,
    raising,
    train,
    wait_until_nothing_is_in_use,
)
from support.clocks import LIMIT
from support.internals import pool_of
from support.processes import SOON, suspend, wait_until_gone
from workloads.counting import CountingError

from marl_collect import ClosedError, RayCollector, WorkerError
from marl_collect.distributed import pool
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.processes import cleanup

pytest_plugins = ["support.ray_cluster"]
pytestmark = pytest.mark.usefixtures("cluster")
TWO: dict[str, Any] = {"sync": True, "frames_per_batch": 40, **SHARED}


def test_a_collector_continues_from_a_state_that_was_taken_after_losing_an_actor() -> (
    None
):
    options = {**TWO, "num_collectors": 2, "prefetch": True}
    with RayCollector(masked, None, **options) as first:
        before = first.next()["collector", "traj_ids"].clone()
        kill(first.actors[1]["pid"])
        state = first.state_dict()
        expected = [first.next().clone() for _ in range(2)]
        first.load_state_dict(state)
        assert_same(first.next(), expected[0])
    with RayCollector(masked, None, **{**options, "seed": 9}) as second:
        second.load_state_dict(state)
        for batch in expected:
            assert_same(second.next(), batch)
    assert expected[0]["collector", "traj_ids"][1].min() > before[1].max()


def test_a_lost_node_is_replaced_until_no_restart_is_left(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_node(num_cpus=4, resources={"away": 4})
    cluster.wait_for_nodes()
    home, away = {"resources": {"home": 1}}, {"resources": {"away": 1}}
    # Its second batch lasts until its node is lost.
    hangs = DiesOnce(tmp_path / "built", 27, "hang")
    collector = RayCollector(
        [masked, hangs], biased(), remote_configs=[home, away], max_restarts=1, **TWO
    )
    first = collector.next().clone()
    train(collector)
    actors_before = {actor["index"]: actor for actor in collector.actors}
    lost = next(
        n for n in cluster.worker_nodes if n.node_id == actors_before[1]["node"]
    )
    # The first batch, but not the weights. A node tells the others every second what is
    # no longer needed; what it has not told stays in their memory if it is lost.
    wait_until_nothing_is_in_use(cpus=2, nbytes=10_000)
    with ThreadPoolExecutor() as threads:
        removed = threads.submit(cluster.remove_node, lost, allow_graceful=False)
        second = collector.next()
        removed.result()
    wait_until_gone([actors_before[1]["pid"]])
    assert collector.frames == 80
    assert environments(second) == [0, 1]
    assert (second["hunter", "bias"] == 1).all()
    ids = ("collector", "traj_ids")
    assert (second[ids][1] > first[ids][1, -1]).all()
    stats = collector.stats()
    assert stats["restarts"] == 1
    lost = "Restarting: Worker 1 was lost with actor 1"
    assert any(text.startswith(lost) for text in caplog.messages)
    assert stats["cut_trajectories"] == [int(first[ids][1, -1])] or (
        first["next", "done"][1, -1].item()
    )
    actors_after = {actor["index"]: actor for actor in collector.actors}
    assert actors_after[0] == actors_before[0]
    assert actors_after[1]["node"] != actors_before[1]["node"]
    kill(actors_after[1]["pid"])
    with pytest.raises(WorkerError, match="No restart is left") as raised:
        collector.next()
    assert raised.value.worker == 1
    with pytest.raises(WorkerError, match="No restart is left"):
        collector.next()
    wait_until_gone([actors_after[0]["pid"]])
    wait_until_nothing_is_in_use()
    assert (first["policy_version"] == 0).all()


def test_a_worker_that_fails_again_and_again_is_an_error() -> None:
    with (
        RayCollector(
            raising, frames_per_batch=20, on_worker_failure="restart"
        ) as collector,
        pytest.raises(CountingError, match="fault in step") as error,
    ):
        collector.next()
    assert any("failed 4 times in a row" in note for note in error.value.__notes__)


class FailsOnce:
    """Builds environments; raises an error the second time."""

    def __init__(self, folder: Path) -> None:
        self.built, self.failed = folder / "built", folder / "failed"

    def __call__(self) -> Any:
        if self.built.exists() and not self.failed.exists():
            self.failed.touch()
            raise RuntimeError("it cannot be built now")
        self.built.touch()
        return masked()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_that_fails_while_its_actor_is_replaced_is_replaced_too(
    failing: int, tmp_path: Path
) -> None:
    factories: list[Any] = [masked, masked]
    factories[failing] = fails = FailsOnce(tmp_path)
    options = {**TWO, "num_workers_per_collector": 2, "on_worker_failure": "restart"}
    with RayCollector(factories, None, **options) as collector:
        collector.next()
        kill(collector.actors[0]["pid"])
        assert environments(collector.next()) == [0, 1]
        assert fails.failed.exists()
        assert environments(collector.next()) == [0, 1]
        stats = collector.stats()
    assert (stats["restarts"], stats["worker_restarts"]) == (1, 1)


def test_an_actor_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP stops the actor, and its worker waits for it."""
    real, ahead = time.monotonic, 0.0
    with RayCollector(
        masked, None, frames_per_batch=20, sync=True, timeout=LIMIT, seed=1
    ) as collector:
        actors = pool_of(collector)

        def monotonic() -> float:
            """Until the actor is lost, each look is a quarter of the limit later."""
            nonlocal ahead
            if actors.lost_actors == 0:
                ahead += LIMIT / 4
            return real() + ahead

        first = collector.next()["collector", "traj_ids"].clone()
        pid = collector.actors[0]["pid"]
        suspend(pid)
        monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=monotonic))
        batch = collector.next()
        assert batch["collector", "traj_ids"].min() > first.max()
        assert collector.stats()["restarts"] == 1
        wait_until_gone([pid])
        assert collector.actors[0]["pid"] != pid


class Unanswered:
    """Ray with calls that are not answered, and a clock that the test sets."""

    now = 0.0
    exceptions = SimpleNamespace(RayError=RuntimeError)

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], references

    def get(self, references: list[Any], **_: Any) -> list[Any]:
        assert references == []
        return []


def test_a_pause_of_the_trainer_is_no_silence_of_an_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Unanswered()
    monkeypatch.setattr(time, "monotonic", lambda: ray.now)
    waiting: Any = object.__new__(pool.RayPool)  # It starts nothing.
    options = RayOptions(lambda: None, frames_per_batch=1, timeout=8)
    waiting._options, waiting._ray = options, ray
    killed: list[Any] = []
    monkeypatch.setattr(waiting, "_kill", killed.append)
    reference: Any = object()
    actor = pool.Actor(0, [reference], looked=object())

    def after(seconds: float) -> None:
        ray.now += seconds
        waiting._check(actor)

    after(400)  # Ctrl-Z: it counts as two seconds.
    after(5)
    after(1)
    assert killed == []
    after(1.5)
    after(1.5)
    assert killed == [actor]
    assert actor.lost == "it has not answered for 8 seconds"


def test_an_actor_without_free_resources_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"not ready after 2 seconds.*remote_configs"):
        RayCollector(
            masked,
            frames_per_batch=20,
            start_timeout=2,
            max_restarts=0,
            remote_configs={"resources": {"nowhere": 1}},
        )


def test_a_collector_that_was_shut_down_raises_an_error() -> None:
    collector = RayCollector(masked, frames_per_batch=10)
    # A collector that is still open is shut down before the interpreter ends.
    assert pool_of(collector) in cleanup._open
    batch = collector.next()
    copy = batch.clone()
    collector.shutdown()
    collector.shutdown()
    assert_same(batch, copy)
    with pytest.raises(ClosedError):
        collector.next()


def test_ray_is_not_stopped_while_a_thread_receives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RayCollector(hanging, frames_per_batch=10) as collector:
        actors = pool_of(collector)
        looks, ended, stopped = (threading.Event() for _ in range(3))
        nobody_receives: list[bool] = []
        end, stop = actors._end, actors.cluster.close

        def look(actor: Any) -> None:
            looks.set()
            assert ended.wait(SOON)
            stopped.wait(0.3)  # In vain, unless Ray is stopped meanwhile.

        def noted_end(*args: Any) -> Any:
            failures = end(*args)
            ended.set()
            return failures

        def noted_stop() -> None:
            nobody_receives.append(actors._reading.acquire(blocking=False))
            stopped.set()
            stop()

        monkeypatch.setattr(actors, "_check", look)
        monkeypatch.setattr(actors, "_end", noted_end)
        monkeypatch.setattr(actors.cluster, "close", noted_stop)
        with ThreadPoolExecutor(1) as executor:
            batch = executor.submit(collector.next)
            assert looks.wait(SOON)
            actors.close()
            with pytest.raises(ClosedError):
                batch.result(SOON)
        assert nobody_receives == [True]
