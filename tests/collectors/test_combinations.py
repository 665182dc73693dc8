"""Combinations of options in which one could break the guarantees of the other."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests_policies import at_level
from workloads.counting import CountingEnv, Fault

from marl_collect.buffers.compact_observations import restore_next
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

ENVS = [CountingEnv] * 2


def preempting() -> dict[str, Any]:
    slow = lambda: CountingEnv(  # noqa: E731
        fault=Fault("sleep", "step", repeat=True, seconds=0.05)
    )
    return {"create_env_fn": [CountingEnv, CountingEnv, slow]}


@pytest.mark.torchrl_defect("D3")
@pytest.mark.parametrize(
    "shape",
    [{"split_trajs": True}, {"trajs_per_batch": 2}, {"cat_results": 0}],
    ids=lambda shape: next(iter(shape)),
)
def test_preempted_frames_are_left_out_of_all_shapes_of_a_batch(
    shape: dict[str, Any],
) -> None:
    collector = MultiSyncCollector(
        **preempting(),
        frames_per_batch=60,
        total_frames=150,
        preemptive_threshold=0.5,
        set_truncated="trajs_per_batch" not in shape,
        **shape,
    )
    frames = 0
    for batch in collector:
        mask = batch.get(("collector", "mask"), torch.ones(batch.shape).bool())
        assert (batch["collector", "traj_ids"][mask] >= 0).all()
        valid = batch[mask]
        # Observations of acting agents are not zero, so no row is padding.
        acts = valid["hunter", "mask"] & ~valid["hunter", "done"][..., 0]
        assert valid["hunter", "observation"][acts][:, 3].ge(0).all()
        frames += int(mask.sum())
        if "split_trajs" in shape:
            ends = mask.sum(1) - 1
            assert batch["next", "done"][torch.arange(len(ends)), ends].all()
    counted = collector.stats()["frames"]
    assert frames <= counted if "trajs_per_batch" in shape else frames == counted


def test_other_batches_than_those_of_compact_obs_are_not_restored() -> None:
    with pytest.raises(KeyError, match="not collected with compact_obs"):
        restore_next(TensorDict({"next": {"done": torch.zeros(1, 1)}}, [1, 1]))


def recorded(collector: Any, batches: int) -> list[TensorDict]:
    return [collector.next().clone() for _ in range(batches)]


def test_preempted_batches_resume_with_the_frames_that_were_taken() -> None:
    """How many frames a slow worker collects is random; what follows them is not."""
    options: dict[str, Any] = preempting() | {
        "frames_per_batch": 60,
        "preemptive_threshold": 0.5,
    }
    # A deterministic policy, because noise is also drawn for frames that are dropped.
    options["policy"] = at_level(1.0)()
    with Collector(
        [CountingEnv] * 3, options["policy"], frames_per_batch=300, seed=4
    ) as uninterrupted:
        rows = uninterrupted.next()
    with MultiSyncCollector(**options, seed=4) as first:
        delivered = recorded(first, 2)
        state = first.state_dict()
    with MultiSyncCollector(**options, seed=9) as second:
        second.load_state_dict(state)
        delivered += recorded(second, 2)
    for k in range(3):
        row: Any = torch.cat([b[k][b["collector", "mask"][k]] for b in delivered])
        comparisons = (row.exclude(("collector", "mask")) == rows[k, : len(row)]).items(
            True, True
        )
        assert not [key for key, equal in comparisons if not equal.all()], k


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_batches_of_trajectories_do_not_wait_for_ever(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.buffers.trajectories.LONGEST", 100)
    endless = partial(CountingEnv, min_length=10**9, max_length=10**9, deaths=False)
    # Episodes of environment 1 end, but those of the other one never do.
    build = partial(kind, [endless, CountingEnv], frames_per_batch=40)
    with build(trajs_per_batch=2**40) as collector:
        for _ in range(2):  # The collector is closed by its error.
            with pytest.raises(RuntimeError, match="environment 0 .*max_frames_per_tr"):
                collector.next()
    with build(trajs_per_batch=90, max_frames_per_traj=150) as collector:
        assert collector.next().shape == (90, 150)
