"""Collectors treat the worlds of a simulator like single environments."""

from functools import partial
from typing import Any

import pytest
import torch
from support.worlds import CountingWorlds
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    PolicyPool,
    SerialEnv,
    describe,
    open_dataset,
    record,
)
from marl_collect.buffers.layout import MANY
from marl_collect.core.tensordicts import flatten
from marl_collect.models import make_policy

K = 3
Worlds = partial(CountingWorlds, K, action_mask=True)
single = partial(CountingEnv, action_mask=True)
KEYWORDS: Any = {"frames_per_batch": 24 * K, "total_frames": -1, "seed": 5}


def policy(**keywords: Any) -> nn.Module:
    torch.manual_seed(1)
    return make_policy(single, num_cells=(8,), **keywords)


def resumed(make: Any, batches: int) -> None:
    """Check that a new collector continues from the state of another one."""
    with make() as straight, make() as other:
        for _ in range(batches):
            straight.next()
        other.next()
        other.load_state_dict(straight.state_dict())
        for _ in range(2):
            assert (straight.next() == other.next()).all()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_running_episodes_of_worlds_are_resumed(batches: int, recurrent: bool) -> None:
    acting = policy(**({"recurrent": "gru"} if recurrent else {}))
    resumed(lambda: Collector(Worlds, acting, **KEYWORDS), batches)


def test_long_and_short_episodes_are_resumed_together() -> None:
    factory = partial(CountingWorlds, 6, min_length=2, max_length=40, deaths=False)
    keywords = KEYWORDS | {"frames_per_batch": 6 * 17, "max_frames_per_traj": 31}
    resumed(lambda: Collector(factory, None, **keywords), 4)


def whole_trajectories(batches: list[Any]) -> tuple[Any, list[int]]:
    """Return the frames of whole trajectories of batches ``[K, T]``, and their lengths.

    They are in the order of their ends. Those that end in one batch are in the order of
    its rows.
    """
    rows = torch.cat(batches, 1)
    ids = rows["collector", "traj_ids"]
    frames = [
        (row, (ids[row] == trajectory).nonzero().flatten())
        for batch in batches
        for row, done in enumerate(batch["next", "done"][..., 0])
        for trajectory in batch["collector", "traj_ids"][row][done]
    ]
    lengths = [len(times) for _, times in frames]
    places = [row for row, times in frames for _ in times]
    return rows[places, torch.cat([times for _, times in frames])], lengths


@pytest.mark.parametrize("worlds", [K, MANY + 2])
def test_whole_trajectories_of_worlds_are_those_of_plain_batches(worlds: int) -> None:
    factory = partial(CountingWorlds, worlds, min_length=2, max_length=12)
    keywords = KEYWORDS | {"frames_per_batch": 9 * worlds}
    with Collector(factory, None, **keywords) as plain:
        expected, ends = whole_trajectories([plain.next().clone() for _ in range(7)])
    for form in ("cat", "padded"):
        keywords |= {"trajs_per_batch": worlds, "traj_format": form}
        with Collector(factory, None, **keywords) as first:
            batches = [first.next() for _ in range(3)]
            state = first.state_dict()
        with Collector(factory, None, **keywords) as second:
            second.load_state_dict(state)
            while second.frames < 6 * 9 * worlds:
                batches.append(second.next())
        parts: list[Any] = []
        lengths: list[int] = []
        for batch in batches:
            if form == "padded":
                valid = batch["collector"].pop("mask")
                assert not any(leaf[~valid].any() for leaf in flatten(batch).values())
                batch = batch[valid]
            part, part_lengths = whole_trajectories([batch[None]])
            parts.append(part)
            lengths += part_lengths
        assert len(lengths) == len(batches) * worlds > 5 * worlds, form
        common = min(len(lengths), len(ends))
        assert lengths[:common] == ends[:common], form
        frames = sum(ends[:common])
        assert (torch.cat(parts)[:frames] == expected[:frames]).all(), form


def test_a_state_may_have_no_open_trajectory() -> None:
    factory = partial(CountingWorlds, K, min_length=8, max_length=8, deaths=False)
    keywords = KEYWORDS | {"frames_per_batch": 8 * K, "trajs_per_batch": K}
    resumed(lambda: Collector(factory, None, **keywords), 2)


def test_worlds_that_reset_themselves_begin_new_episodes() -> None:
    factory = partial(CountingWorlds, K, resets_itself=True)
    with (
        Collector(factory, None, **KEYWORDS) as straight,
        Collector(factory, None, **KEYWORDS) as other,
    ):
        straight.next()
        with pytest.warns(UserWarning, match="does not repeat its episodes"):
            other.load_state_dict(straight.state_dict())
        assert (other.next()["hunter", "observation"][:, 0, 0, 1] == 0).all()


@pytest.mark.parametrize("trajs", [None, 4])
def test_workers_with_worlds_collect_what_one_process_collects(
    trajs: int | None,
) -> None:
    keywords = KEYWORDS | {"frames_per_batch": 48 * K}
    if trajs is not None:
        keywords |= {"trajs_per_batch": trajs, "traj_format": "cat"}
    acting = policy()
    with (
        Collector([single] * (2 * K), acting, **keywords) as expected,
        MultiSyncCollector([Worlds] * 2, acting, **keywords) as actual,
    ):
        for number in range(2):
            expected_batch, actual_batch = expected.next(), actual.next()
            if trajs is not None:
                assert expected_batch.shape == actual_batch.shape
            assert (expected_batch == actual_batch).all()
            with torch.no_grad():
                for weight in acting.parameters():
                    weight.mul_(1 + number / 8)
            actual.update_policy_weights_()
        state = actual.state_dict()
        following = actual.next()
    with MultiSyncCollector(
        [Worlds] * 2, policy(), cat_results=None, **keywords
    ) as new:
        new.load_state_dict(state)
        assert (new.next() == following).all()


def either(seed: int, agents: Any) -> dict[str, str]:
    return {a: "past" if (seed + i) % 2 else "main" for i, a in enumerate(agents)}


@pytest.mark.parametrize("pooled", [False, True])
def test_policies_are_assigned_in_each_world(pooled: bool) -> None:
    def started(kind: Any, factories: Any) -> Any:
        net = policy(recurrent="gru")
        other = PolicyPool(net, size=2) if pooled else policy(share_params=False)
        policies = {"main": net, "past": other}
        return kind(factories, policies=policies, assign=either, **KEYWORDS)

    def batches(collector: Any) -> Any:
        for _ in range(2):
            yield collector.next()
            with torch.no_grad():
                for weight in collector.policy["main"].parameters():
                    weight.mul_(-1.1)
            if pooled:
                collector.policy["past"].update()
            collector.update_policy_weights_()

    with (
        started(Collector, [single] * K) as expected,
        started(Collector, Worlds) as actual,
        started(MultiSyncCollector, [Worlds]) as workers,
    ):
        collectors = (expected, actual, workers)
        for first_batch, *other_batches in zip(*map(batches, collectors), strict=True):
            assert len(first_batch["hunter", "policy_id"].unique()) > 1
            for other in other_batches:
                assert (first_batch == other).all()


def test_async_workers_take_worlds() -> None:
    with MultiAsyncCollector([Worlds] * 2, policy(), **KEYWORDS) as collector:
        batch = collector.next()
    assert batch["hunter", "observation"].shape == (K, 24, 2, 5)
    steps = batch["hunter", "observation"][:, :, 0, 1]
    dones = batch["next", "done"][:, :-1, 0]
    assert (steps[:, 1:][dones] == 0).all()


def test_worlds_are_described_and_recorded(tmp_path: Any) -> None:
    assert describe(Worlds) == single().description
    record(tmp_path / "data", Worlds, policy(), frames=201, seed=2)
    record(tmp_path / "other", [single] * K, policy(), frames=201, seed=2)
    actual, expected = (open_dataset(tmp_path / name) for name in ("data", "other"))
    assert list(actual.trajectories.lengths) == list(expected.trajectories.lengths)
    assert list(actual.trajectories.seeds) == list(expected.trajectories.seeds)


@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
def test_joint_environments_refuse_worlds_and_name_the_way(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"CountingWorlds. Pass it to a collector"):
        kind(2, Worlds)


def test_several_batches_in_one_process_are_refused_with_the_way() -> None:
    with pytest.raises(TypeError, match="Build one batch with more worlds"):
        Collector([Worlds] * 2, None, **KEYWORDS)
