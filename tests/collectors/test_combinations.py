"""Combinations of options in which one could break the guarantees of the other."""

import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tests_policies import at_level, level_policy
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from workloads.counting import CountingEnv, Fault

from marl_collect.buffers.compact_observations import KEY as KEPT_APART
from marl_collect.buffers.compact_observations import restore_next
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.models import make_policy

ENVS = [CountingEnv] * 2
KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
every_kind = pytest.mark.parametrize("kind", KINDS)


def recurrent() -> Any:
    torch.manual_seed(0)
    return make_policy(CountingEnv(), recurrent="gru", hidden_size=3)


def preempting() -> dict[str, Any]:
    slow = lambda: CountingEnv(  # noqa: E731
        fault=Fault("sleep", "step", repeat=True, seconds=0.05)
    )
    return {"create_env_fn": [CountingEnv, CountingEnv, slow]}


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


def test_update_at_each_batch_with_prefetch_lags_by_one_batch() -> None:
    """With update_at_each_batch the weights are exactly one batch old."""
    policy = level_policy()
    collector = MultiSyncCollector(
        ENVS,
        policy,
        frames_per_batch=8,
        total_frames=64,
        prefetch=True,
        update_at_each_batch=True,
        track_policy_version=True,
    )
    versions, actions = [], []
    for step, batch in enumerate(collector):
        versions.append(int(batch["policy_version"].unique()))
        actions.append(float(batch["prey", "action"].unique()))
        with torch.no_grad():
            policy.module.level.fill_(step + 1)
    assert versions == [0, 0, 1, 2, 3, 4, 5, 6]
    assert actions == [0, 0, 1, 2, 3, 4, 5, 6]


@every_kind
def test_a_buffer_gets_only_whole_trajectories(kind: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    collector = kind(
        ENVS,
        frames_per_batch=20,
        total_frames=200,
        trajs_per_batch=2,
        replay_buffer=buffer,
        seed=0,
    )
    assert all(batch is None for batch in collector)
    buffered = buffer[:]
    ids, counts = torch.unique_consecutive(
        buffered["collector", "traj_ids"], return_counts=True
    )
    assert len(ids.unique()) == len(ids) >= 8
    for rows in buffered.split(counts.tolist()):
        assert rows["hunter", "observation"][0, :, 1].eq(0).all(), "does not begin"
        assert rows["next", "done"].flatten().tolist() == [False] * (len(rows) - 1) + [
            True
        ]


@every_kind
def test_a_recurrent_policy_works_with_compact_observations(kind: Any) -> None:
    options: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 60, "seed": 0}
    if kind is MultiAsyncCollector:
        options["num_workers"] = 1
    full = [b.clone() for b in kind(ENVS, recurrent(), **options)]
    compact = [
        restore_next(b.clone())
        for b in kind(ENVS, recurrent(), compact_obs=True, **options)
    ]
    for batch, other in zip(full, compact, strict=True):
        assert set(batch.keys(True, True)) == set(other.keys(True, True))
        assert (batch == other).all()


def test_compact_observations_that_a_policy_changes_need_no_restoring() -> None:
    def policy(td: TensorDictBase) -> None:
        td["hunter", "action"] = torch.zeros(td.batch_size[0], 2, dtype=torch.int64)
        td["hunter", "observation"] = td["hunter", "observation"] / 2

    make = lambda: CountingEnv(n_prey=0)  # noqa: E731
    options: Any = {"frames_per_batch": 9, "seed": 0}
    with Collector(make, policy, **options) as collector:
        expected = collector.next()
    with Collector(make, policy, compact_obs=True, **options) as collector:
        assert (restore_next(collector.next()) == expected).all()
    with pytest.raises(KeyError, match="not collected with compact_obs"):
        restore_next(TensorDict({"next": {"done": torch.zeros(1, 1)}}, [1, 1]))


@pytest.mark.parametrize(
    ("cat_results", "shape"), [("stack", (2, 4)), (0, (8,)), (-1, (8,)), (None, (2, 4))]
)
def test_workers_of_a_population_differ_in_every_shape_of_a_batch(
    cat_results: Any, shape: Any
) -> None:
    with MultiSyncCollector(
        ENVS,
        policy_factory=[at_level(1.0), at_level(2.0)],
        frames_per_batch=8,
        cat_results=cat_results,
    ) as collector:
        batch = collector.next()
        assert batch.shape == shape
        actions = batch["prey", "action"][..., 0, 0].flatten().tolist()
        assert actions == [1.0] * 4 + [2.0] * 4


def recorded(collector: Any, batches: int) -> list[TensorDict]:
    recorded_batches = [collector.next().clone() for _ in range(batches)]
    return [
        restore_next(batch) if KEPT_APART in batch.keys(include_nested=True) else batch
        for batch in recorded_batches
    ]


RESUMED: dict[str, dict[str, Any]] = {
    "split": {"split_trajs": True, "set_truncated": True},
    "concatenated": {"cat_results": -1},
    "compact": {"compact_obs": True, "policy": recurrent},
    "recurrent": {"policy": recurrent, "prefetch": True},
    "population": {
        "policy_factory": [at_level(1.0), at_level(2.0)],
        "cat_results": "stack",
    },
    "published": {
        "policy": at_level(3.0),
        "update_at_each_batch": True,
        "prefetch": True,
        "track_policy_version": True,
    },
    "given apart": {"frames_per_batch": [8, 20], "reset_at_each_iter": True},
}


@pytest.mark.parametrize("name", RESUMED)
def test_each_combination_resumes_exactly(name: str) -> None:
    options = {"frames_per_batch": 22, "max_frames_per_traj": 9} | RESUMED[name]
    make = options.pop("policy", lambda: None)
    with MultiSyncCollector(ENVS, make(), seed=4, **options) as first:
        recorded(first, 2)
        state = first.state_dict()
        expected = recorded(first, 2)
    with MultiSyncCollector(ENVS, make(), seed=9, **options) as second:
        second.load_state_dict(state)
        for batch, other in zip(expected, recorded(second, 2), strict=True):
            assert batch.shape == other.shape
            comparisons = (batch == other).items(True, True)
            assert not [
                key
                for key, equal in comparisons
                # With prefetch the unfinished batch uses the newest weights.
                if "policy_version" not in key and not equal.all()
            ]


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


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("form", ["padded", "cat"])
def test_unfinished_trajectories_are_resumed(kind: Any, form: Any) -> None:
    options: dict[str, Any] = {
        "frames_per_batch": 50,
        "trajs_per_batch": 2,
        "traj_format": form,
    }
    with kind(ENVS, at_level(1.0)(), seed=4, **options) as first:
        recorded(first, 4)
        stream = io.BytesIO()
        torch.save(first.state_dict(), stream)
        stream.seek(0)
        state = torch.load(stream)
        expected = recorded(first, 6)
    assert len(state["trajectories"]["done",])
    with kind(ENVS, at_level(0.0)(), seed=9, **options) as second:
        second.load_state_dict(state)
        for batch, other in zip(expected, recorded(second, 6), strict=True):
            assert batch.shape == other.shape
            comparisons = (batch == other).items(True, True)
            assert not [key for key, equal in comparisons if not equal.all()]


def test_whole_trajectories_of_async_workers_are_complete() -> None:
    options: Any = {"frames_per_batch": 22, "trajs_per_batch": 1, "traj_format": "cat"}
    with MultiAsyncCollector(ENVS, seed=4, **options) as first:
        recorded(first, 3)
        state = first.state_dict()
    with MultiAsyncCollector(ENVS, seed=9, **options) as second:
        second.load_state_dict(state)
        for trajectory in recorded(second, 8):
            assert trajectory["hunter", "observation"][0, :, 1].eq(0).all()
            assert trajectory["next", "done"][-1].all()
