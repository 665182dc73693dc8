"""Ranks of a job collect what one collector would, and never the same data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from tests_policies import level_policy
from workloads.counting import CountingEnv

from marl_collect import evaluate
from marl_collect.collectors import Collector


def options(frames: int, **more: Any) -> dict[str, Any]:
    return {"frames_per_batch": frames, "seed": 7, "max_frames_per_traj": 5} | more


@pytest.fixture(params=["torchrun", "torch.distributed"])
def job(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int], None]:
    """Return what makes this process a rank of a job."""

    def torchrun(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    def distributed(rank: int, world_size: int) -> None:
        torchrun(0, 9)  # What torch says comes first.
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)

    return torchrun if request.param == "torchrun" else distributed


def first_environment(**more: Any) -> int:
    with Collector([CountingEnv] * 2, **options(8, **more)) as collector:
        return int(collector.next()["collector", "traj_ids"].min()) >> 32


def test_ranks_of_a_job_have_environments_of_their_own(
    job: Callable[[int, int], None],
) -> None:
    job(3, 4)
    assert first_environment() == 6
    assert first_environment(rank=1, world_size=4) == 2
    assert first_environment(worker_idx=2) == 4


EVALUATIONS = """
from marl_collect import Evaluator, evaluate
from marl_collect.evaluation import evaluator
from workloads.counting import CountingEnv

games = {"num_workers": 1, "envs_per_worker": 2, "max_frames_per_traj": 5}
_play = Evaluator._play


def counting(self, root, seeds, first=0):
    print("plays", len(seeds), flush=True)
    return _play(self, root, seeds, first)


Evaluator._play = counting


def breaking():
    raise OSError("no licence on this rank")


def alike(one, other):
    return repr(one.episodes) == repr(other.episodes)


if rank == 0:  # Waits for nobody.
    alone = evaluate(None, CountingEnv, episodes=5, seeds=3, **games)
for seeds in (3, [5, 4, 3, 2, 1], [9]):
    together = evaluate(
        None, CountingEnv, episodes=5 if seeds != [9] else 1, seeds=seeds,
        all_ranks=True, **games
    )
    expected = evaluate(
        None, CountingEnv, episodes=len(together.episodes), seeds=seeds, **games
    )
    print("equal", alike(together, expected), flush=True)
for factory, seeds, episodes in [
    (CountingEnv, rank, 4),
    (CountingEnv, 0, 4 + rank),
    (breaking if rank else CountingEnv, 0, 4),
]:
    try:
        evaluate(
            None, factory, episodes=episodes, seeds=seeds, all_ranks=True, **games
        )
    except (OSError, ValueError, RuntimeError) as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""


@pytest.mark.processes
def test_ranks_share_the_episodes_of_an_evaluation(tmp_path: Path) -> None:
    first, second = (text.splitlines() for text in run_ranks(tmp_path, EVALUATIONS, 2))
    equal = ["equal True"]
    assert first[:10] == [
        *["plays 5"],  # Alone.
        *["plays 3", "plays 5", *equal, "plays 3", "plays 5", *equal],
        *["plays 1", "plays 1", *equal],
    ]
    assert second[:8] == [
        *["plays 2", "plays 5", *equal, "plays 2", "plays 5", *equal],
        *["plays 1", *equal],  # A single episode is rank 0's.
    ]
    for lines in first[10:12], second[8:10]:
        assert "ValueError evaluate(all_ranks=True) plays the same" in lines[0]
        assert "pass equal episodes and seeds" in lines[1]
    assert first[12] == "plays 2"
    assert "RuntimeError evaluate(all_ranks=True) failed on rank 1. OSErr" in first[13]
    assert second[10:] == ["OSError no licence on this rank"]


def test_ranks_that_are_not_connected_share_no_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes before anything is played."""
    arguments: dict[str, Any] = {"episodes": 2, "num_workers": 1}
    alone = evaluate(None, CountingEnv, **arguments, all_ranks=True)
    assert alone.team_returns == evaluate(None, CountingEnv, **arguments).team_returns
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        evaluate(None, CountingEnv, **arguments, all_ranks=True)


def test_a_rank_is_that_of_the_start(job: Callable[[int, int], None]) -> None:
    with Collector(CountingEnv, level_policy(), **options(8)) as collector:
        job(1, 2)
        collector.next()
        state = collector.state_dict()
        assert state["numbering"] == {"rank": 0, "world_size": 1, "worker_idx": None}
        collector.load_state_dict(state)
        assert int(collector.next()["collector", "traj_ids"].max()) >> 32 == 0


def test_a_state_resumes_on_its_rank_only() -> None:
    of = options(8)
    rank: dict[str, Any] = {"rank": 1, "world_size": 2}
    others: list[dict[str, Any]] = [
        {"rank": 0, "world_size": 2},
        {"rank": 1, "world_size": 3},
        {"worker_idx": 1},
        {},
    ]
    with Collector(CountingEnv, level_policy(), **of, **rank) as collector:
        collector.next()
        state = collector.state_dict()
    for other in others:
        with (
            Collector(CountingEnv, level_policy(), **of, **other) as collector,
            pytest.raises(ValueError, match="saved by rank 1 of 2, but this is "),
        ):
            collector.load_state_dict(state)
    with Collector(CountingEnv, level_policy(), **of, worker_idx=1) as collector:
        state = collector.state_dict()
        collector.load_state_dict(state)
    with (
        Collector(CountingEnv, level_policy(), **of, worker_idx=2) as collector,
        pytest.raises(ValueError, match="by worker_idx 1, but this is worker_idx 2"),
    ):
        collector.load_state_dict(state)


def test_statistics_of_all_ranks_need_a_connection() -> None:
    with Collector(CountingEnv, **options(8), rank=0, world_size=2) as collector:
        collector.next()
        assert collector.stats()["frames"] == 8
        with pytest.raises(RuntimeError, match="init_process_group"):
            collector.stats(all_ranks=True)
    with Collector(CountingEnv, **options(8)) as collector:
        collector.next()
        assert collector.stats(all_ranks=True) == collector.stats()


STATISTICS = """
import torch
from marl_collect.collectors import Collector
from workloads.counting import CountingEnv


def said(collector):
    try:
        stats = collector.stats(all_ranks=True)
        print({k: stats[k] for k in ("frames", "batches", "restarts", "episodes")})
        print(stats["cut_trajectories"], stats["seconds_collecting"])
    except RuntimeError as error:
        print(error)


def built(environments, **more):
    return Collector(
        [CountingEnv] * environments, frames_per_batch=4, max_frames_per_traj=2, **more
    )


with built(2) as collector:
    collector.next()
    collector._statistics.cut([rank], [rank])
    collector._statistics.collecting = 5.0 + rank
    collector._statistics.restarts = 1 + rank
    said(collector)
    if rank:
        collector.next()
    said(collector)
with built(1 + rank) as collector:
    collector.next()
    said(collector)
with built(2, trajs_per_batch=1 + rank) as collector:
    collector.next()
    said(collector)
with built(2, replay_buffer=[], total_frames=8 + 8 * rank) as collector:
    collector.start()
    collector._thread.join()
    said(collector)
"""


@pytest.mark.processes
def test_statistics_of_ranks_that_differ_are_not_mixed(tmp_path: Path) -> None:
    for text in run_ranks(tmp_path, STATISTICS, 2):
        counters, others, batches, environments, rest = text.split("\n", 4)
        expected = {"frames": 8, "batches": 2, "restarts": 3, "episodes": 4}
        assert counters == str(expected)
        assert others == f"[0, {(1 << 32) + 1}] 6.0"
        assert "the ranks have collected [1, 2] batches" in batches
        assert "the ranks have [1, 2] environments" in environments
        # Batches of trajectories and in the background are not counted alike.
        assert rest.count("{'frames'") == 2
        assert "{'frames': 24," in rest
