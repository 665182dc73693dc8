"""Lost actors and nodes, which are really killed: results and leftovers."""

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from support.processes import SOON, wait_until_gone
from support.scripts import run_python

from marl_collect import ClosedError, MultiSyncCollector, RayCollector, WorkerError
from marl_collect.distributed import watchdog
from marl_collect.testing.counting import CountingError

pytest_plugins = ["support.ray_cluster"]
pytestmark = pytest.mark.usefixtures("cluster")
TWO: dict[str, Any] = {"sync": True, "frames_per_batch": 40, **SHARED}


def batches_of(collector: Any) -> list[Any]:
    """Collect three batches, with new weights each."""
    batches = []
    for _ in range(3):
        batches.append(collector.next().clone())
        train(collector)
    return batches


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_process_has_the_same_result_as_locally(
    workers: int, tmp_path: Path
) -> None:
    """A single environment runs in the actor itself, several in workers."""
    options: dict[str, Any] = {
        "frames_per_batch": 40,
        "on_worker_failure": "restart",
        **SHARED,
    }
    died = tmp_path / "locally"
    with MultiSyncCollector([masked, DiesOnce(died, 27)], biased(), **options) as local:
        expected = batches_of(local)
        cut = local.stats()["cut_trajectories"]
    assert died.exists()
    with RayCollector(
        [masked, DiesOnce(tmp_path / "there", 27)],
        biased(),
        num_workers_per_collector=workers,
        sync=True,
        **options,
    ) as collector:
        for found, wanted in zip(batches_of(collector), expected, strict=True):
            assert_same(found, wanted)
        stats = collector.stats()
    assert stats["frames"] == 120
    assert stats["cut_trajectories"] == cut
    assert len(cut) == 1
    assert (stats["restarts"], stats["worker_restarts"]) == (
        (1, 0) if workers == 1 else (0, 1)
    )


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_collector_continues_from_a_state_that_was_taken_after_losing_an_actor(
    prefetch: bool,
) -> None:
    options = {**TWO, "num_collectors": 2, "prefetch": prefetch}
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
        [masked, hangs],
        biased(),
        remote_configs=[home, away],
        max_restarts=1,
        **TWO,
    )
    first = collector.next().clone()
    train(collector)
    there = {actor["index"]: actor for actor in collector.actors}
    lost = next(n for n in cluster.worker_nodes if n.node_id == there[1]["node"])
    with ThreadPoolExecutor() as threads:
        removed = threads.submit(cluster.remove_node, lost, allow_graceful=False)
        second = collector.next()
        removed.result()
    wait_until_gone([there[1]["pid"]])
    assert collector.frames == 80
    assert environments(second) == [0, 1]
    assert (second["hunter", "bias"] == 1).all()
    ids = ("collector", "traj_ids")
    assert (second[ids][1] > first[ids][1, -1]).all()
    stats = collector.stats()
    assert stats["restarts"] == 1
    assert any(text.startswith("Restarting: actor 1 (") for text in caplog.messages)
    assert stats["cut_trajectories"] == [int(first[ids][1, -1])] or (
        first["next", "done"][1, -1].item()
    )
    now = {actor["index"]: actor for actor in collector.actors}
    assert now[0] == there[0]
    assert now[1]["node"] != there[1]["node"]

    kill(now[1]["pid"])
    with pytest.raises(WorkerError, match="No restart is left") as raised:
        collector.next()
    assert raised.value.worker == 1
    with pytest.raises(WorkerError, match="No restart is left"):
        collector.next()
    wait_until_gone([now[0]["pid"]])
    wait_until_nothing_is_in_use()
    assert (first["policy_version"] == 0).all()


def test_an_exception_is_raised_with_its_own_type() -> None:
    collector = RayCollector([masked, raising], **TWO)
    with pytest.raises(CountingError, match="fault in step") as raised:
        collector.next()
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerError)
    assert cause.worker == 1
    assert "raising" in cause.remote_traceback or "strike" in cause.remote_traceback
    assert any("actor 1" in note for note in raised.value.__notes__)
    wait_until_nothing_is_in_use()


def test_an_actor_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE", 0.5)
    with (
        RayCollector(
            hanging, frames_per_batch=20, timeout=1, max_restarts=0
        ) as collector,
        pytest.raises(WorkerError, match="no progress"),
    ):
        collector.next()


def test_an_actor_without_free_resources_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"not ready after 2 seconds.*remote_configs"):
        RayCollector(
            masked,
            frames_per_batch=20,
            start_timeout=2,
            max_restarts=0,
            remote_configs={"resources": {"nowhere": 1}},
        )


def test_a_ray_of_our_own_ends_with_the_collector() -> None:
    script = """
        import os
        import ray
        from marl_collect import RayCollector
        from marl_collect.testing.counting import CountingEnv

        class Own(Exception):
            pass

        quiet = {"num_cpus": 1, "object_store_memory": 80_000_000}
        try:
            RayCollector(
                CountingEnv,
                frames_per_batch=10,
                ray_init_config=quiet,
                remote_configs={"bogus": 1},
            )
        except ValueError as error:
            assert "bogus" in str(error)
            assert not ray.is_initialized()
        collector = RayCollector(
            lambda: CountingEnv(),
            frames_per_batch=10,
            total_frames=30,
            ray_init_config=quiet,
        )
        assert ray.is_initialized()
        (pid,) = [actor["pid"] for actor in collector.actors]
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(
            os.PRIO_PROCESS, 0
        )
        assert sum(batch.numel() for batch in collector) == 30
        assert not ray.is_initialized()
        assert "RAY_worker_niceness" not in os.environ
        print("pid", pid)
    """
    code = textwrap.dedent(script)
    run = run_python("-c", code, interpreter=True, timeout=4 * SOON)
    assert run.returncode == 0, run.stderr
    wait_until_gone([int(run.stdout.split()[-1])])


def test_a_collector_that_was_shut_down_raises_an_error() -> None:
    collector = RayCollector(masked, frames_per_batch=10)
    batch = collector.next()
    copy = batch.clone()
    collector.shutdown()
    collector.shutdown()
    assert_same(batch, copy)
    with pytest.raises(ClosedError):
        collector.next()
