"""Sums, ids and counts of many environments are those of each of them."""

from typing import Any

import numpy as np
import pytest
from support.worlds import CountingWorlds
from workloads.counting import CountingEnv

from marl_collect import Collector, restore_next
from marl_collect.buffers.layout import MANY
from marl_collect.core import replay
from marl_collect.core.replay import SlotActions
from marl_collect.rollout.episodes import _joined, _sums

ACTION: Any = ("a", "action")


@pytest.mark.parametrize("n_agents", [1, 3, 9])
@pytest.mark.parametrize("frames", [7, 90])
def test_sums_do_not_depend_on_how_many_environments_are_summed(
    n_agents: int, frames: int
) -> None:
    random = np.random.default_rng(frames)
    rewards = random.normal(size=(16, frames, n_agents)).astype(np.float32)
    rewards *= 10.0 ** random.integers(-6, 6, rewards.shape)
    starts = np.zeros(16, np.int64)
    ends = []
    for end in range(1, frames + 1):
        rows = np.flatnonzero(random.random(16) < 0.2)
        if len(rows):
            ends.append((rows, starts[rows], end))
            starts[rows] = end
    joined = _joined(ends)
    total, carried = _sums(rewards, joined, starts, frames)
    for k in range(16):
        own_ends = [
            (np.array([0]), firsts[rows == k], end)
            for rows, firsts, end in ends
            if k in rows
        ]
        single = _sums(rewards[k : k + 1], _joined(own_ends), starts[k : k + 1], frames)
        is_own = joined[0] == k
        assert (single[0] == total[is_own]).all()
        assert (single[1][0] == carried[k]).all()
    totals = np.add.reduce(rewards.astype(np.float64), 1)
    sums = carried.copy()
    np.add.at(sums, joined[0], total)
    np.testing.assert_allclose(sums, totals, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(("limit", "compact"), [(None, False), (7, True)])
def test_many_worlds_give_the_data_of_single_environments(
    limit: int | None, compact: bool
) -> None:
    size = MANY + 2
    keywords: Any = {
        "frames_per_batch": 12 * size,
        "total_frames": 24 * size,
        "seed": 3,
        "max_frames_per_traj": limit,
        "compact_obs": compact,
    }
    options: Any = {"action_mask": True, "image": (40, 40, 3)}
    singles = [lambda: CountingEnv(**options)] * size
    with (
        Collector(singles, None, **keywords) as expected,
        Collector(lambda: CountingWorlds(size, **options), None, **keywords) as actual,
        Collector(
            singles[:2], None, frames_per_batch=4, total_frames=4
        ) as few_collector,
    ):
        for expected_batch, actual_batch in zip(expected, actual, strict=True):
            pair = [restore_next(batch) for batch in (expected_batch, actual_batch)]
            assert (pair[0] == pair[1]).all()
            if limit is not None:  # Most episodes are longer.
                assert int(pair[0]["next", "step_count"].max()) == limit
            assert not actual_batch["next", "hunter", "reward"].is_contiguous()
            image = actual_batch["hunter", "observation", "image"]
            assert image.is_contiguous()
        batch = few_collector.next()
        assert batch["next", "hunter", "reward"].is_contiguous()
        first, second = expected.stats(), actual.stats()
    for name in ("episodes", "mean_returns", "mean_length"):
        assert first[name] == second[name]


def append_slots(
    actions: SlotActions, expected: list[list[Any]], seed: int, count: int
) -> None:
    """Append random slots, also to the actions of each running episode."""
    random, size = np.random.default_rng(seed), len(expected)
    for _ in range(count):
        frames = int(random.integers(1, 6))
        slot = {ACTION: random.integers(0, 100, (size, frames, 2))}
        starts = np.where(random.random(size) < 0.3, random.integers(0, 6, size), 0)
        starts = np.minimum(starts, frames)
        actions.append(slot, starts, frames)
        for k, start in enumerate(starts.tolist()):
            if start:
                expected[k].clear()
            expected[k].extend(slot[ACTION][k, start:])


def assert_taken(mark: SlotActions, expected: Any) -> None:
    episode_actions = mark.cut()
    assert episode_actions.lengths.tolist() == [len(episode) for episode in expected]
    frames = [list(frame) for episode in expected for frame in episode]
    assert [list(frame) for frame in episode_actions.arrays.get(ACTION, ())] == frames


def test_actions_of_running_episodes_are_kept_and_others_are_dropped() -> None:
    actions = SlotActions([ACTION], 20)
    for seed in range(30):
        actions = SlotActions([ACTION], 20) if seed % 3 == 0 else actions
        actions.begin(np.arange(20))
        expected: list[list[Any]] = [[] for _ in range(20)]
        append_slots(actions, expected, seed, seed)
        assert_taken(mark := actions.mark(), expected)
        pairs = zip(mark._blocks, actions._blocks, strict=True)
        assert all(block is held for block, held in pairs)  # It copies none.
        loaded = SlotActions([ACTION], 20)
        append_slots(loaded, [[] for _ in range(20)], seed, seed % 4)  # Are replaced.
        loaded.load(actions.mark().cut())
        assert_taken(loaded.mark(), expected)
        actions = loaded if seed % 3 == 1 else actions
    n_frames = sum(block.frames for block in actions._blocks)
    needed = sum(map(len, expected))
    assert n_frames <= 2 * needed + 9 * 20 * 5


def test_too_long_episodes_have_no_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_BYTES", 100)
    actions = SlotActions([ACTION], 2)
    for number in range(4):
        slot = {ACTION: np.full((2, 2, 2), number)}
        actions.append(slot, np.array([0, 1]), 2)
    assert actions.mark().cut().lengths.tolist() == [-1, 1]
    assert actions.mark().cut().arrays[ACTION].tolist() == [[3, 3]]
    actions.append({ACTION: np.zeros((2, 1, 2))}, np.zeros(2, np.int64), 1)
    assert actions.mark().cut().lengths.tolist() == [-1, 2]
    actions.begin(np.array([0]))
    assert actions.mark().cut().lengths.tolist() == [0, 2]
