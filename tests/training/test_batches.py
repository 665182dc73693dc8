"""Batches of whole episodes, and the draws of a replay buffer, against all frames."""

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import Collector, describe
from marl_collect.models import make_policy
from marl_collect.training.episode_batches import EpisodeBatches
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.replay_buffer import ReplayBuffer

ENVIRONMENTS = 3
DESCRIPTION = describe(CountingEnv)
MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")


def collect(policy: Any, frames: int, **options: Any) -> Collector:
    return Collector(
        CountingEnv,
        policy,
        envs_per_worker=ENVIRONMENTS,
        frames_per_batch=ENVIRONMENTS * frames,
        exploration_type="deterministic",
        seed=5,
        **options,
    )


def played(policy: Any, **options: Any) -> dict[int, Any]:
    """Return all episodes of a long batch that end in it, by their ids."""
    with collect(policy, 300, **options) as collector:
        batch: Any = collector.next()
        rows = [row[row[IDS] == k] for row in batch for k in row[IDS].unique()]
        ended = [row.clone() for row in rows if row["next", "done"][-1].item()]
        return {int(row[IDS][0]): row for row in ended}


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("frames", [1, 4, 40])
def test_a_batch_has_the_first_episodes_of_all(frames: int, limit: int | None) -> None:
    policy = make_policy(CountingEnv, num_cells=(8,))
    episodes = played(policy, max_frames_per_traj=limit)
    frames_before, newest = 0, dict.fromkeys(range(ENVIRONMENTS), -1)
    with collect(policy, frames, max_frames_per_traj=limit) as collector:
        batches = EpisodeBatches(collector, 2 * ENVIRONMENTS)
        lengths, returns = [], []
        for _ in range(3):
            batch = batches.next()
            assert len(batch) == 2 * ENVIRONMENTS
            for row in batch:
                expected = episodes[int(row[IDS][0])]
                row = row[row[MASK]].exclude(MASK)
                assert (row == expected.select(*row.keys(True, True))).all()
                assert {*row.keys(True, True)} == {*expected.keys(True, True)}
                rewards = [row["next", g, "reward"].sum() for g in DESCRIPTION.groups]
                returns.append(float(sum(rewards)))
                lengths.append(len(row))
            begun: dict[int, list[int]] = {k: [] for k in newest}
            for k in batch[IDS][:, 0].tolist():
                begun[k >> 32].append(k & 0xFFFFFFFF)
            for k, (first, second) in begun.items():
                assert second == first + 1
                assert first > newest[k]  # None has older frames.
                newest[k] = second
            assert batches.frames == frames_before + int(batch[MASK].sum())
            frames_before = batches.frames
        stats = batches.stats()
    assert limit or len(set(lengths)) > 1
    assert stats["episodes"] == len(lengths) == 6 * ENVIRONMENTS
    assert stats["frames"] == sum(lengths)
    assert stats["mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    mean = sum(returns) / len(returns)
    assert stats["mean_team_return"] == pytest.approx(mean, rel=1e-5)


def test_all_actions_of_a_batch_are_of_the_newest_weights() -> None:
    policy = make_policy(CountingEnv, num_cells=(8,))
    with collect(policy, 4, track_policy_version=True) as collector:
        batches = EpisodeBatches(collector, ENVIRONMENTS)
        for version in range(4):
            batch = batches.next()
            versions = batch["policy_version"][batch[MASK]]
            assert set(versions.tolist()) == {version}
            with torch.no_grad():
                next(policy.parameters()).add_(0.1)
            batches.update_policy_weights_()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ppo.prefetch": True}, "ppo.prefetch collects with older ones"),
        (
            {"workers": 2, "envs_per_worker": 4},
            r"is 6, but 8 environments \(workers=2, envs_per_worker=4\) cannot",
        ),
    ],
)
@pytest.mark.parametrize("algorithm", ["ippo", "maa2c"])
def test_what_cannot_work_is_named(algorithm: str, settings: Any, message: str) -> None:
    options = {"ppo.episodes_per_batch": 6, "envs_per_worker": 3}
    make = partial(PPOLearner, DESCRIPTION, Setup(algorithm), seed=0)
    assert make(TrainingOptions().with_settings(options)).episodes_per_batch == 6
    with pytest.raises(ValueError, match=message):
        make(TrainingOptions().with_settings(options | settings))


ENVS, FRAMES = 3, 7


class Stream:
    """Frames of environments, numbered, with ends and cuts at random."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[list[tuple[int, bool, int]]] = [[] for _ in range(ENVS)]
        self.ids = list(range(ENVS))

    def batch(self, dtype: torch.dtype) -> tuple[dict[str, Any], Any, Any]:
        """Return the next frames: data, with one entry of this type, ends and ids."""
        numbers, ends, ids = [], [], []
        for env, row in enumerate(self.rows):
            if torch.rand((), generator=self.generator) < 0.2:
                self.ids[env] += ENVS  # A worker was replaced: the episode is cut.
            for _ in range(FRAMES):
                end = bool(torch.rand((), generator=self.generator) < 0.25)
                row.append((1000 * env + len(row), end, self.ids[env]))
                self.ids[env] += ENVS * end
            numbers.append([frame[0] for frame in row[-FRAMES:]])
            ends.append([frame[1] for frame in row[-FRAMES:]])
            ids.append([frame[2] for frame in row[-FRAMES:]])
        number = torch.tensor(numbers)
        data = {"number": number, "pair": torch.stack([number, -number], -1).float()}
        data["small"] = (number % 200).to(dtype)
        return data, torch.tensor(ends), torch.tensor(ids)

    def episodes(self, length: int) -> set[tuple[int, ...]]:
        """Return the numbers of each whole episode in the newest frames."""
        whole = set()
        for row in self.rows:
            newest = row[-length:]
            for frame in newest:
                if frame[1]:
                    same = [f for f in row if f[2] == frame[2]]
                    if all(f in newest for f in same):
                        whole.add(tuple(f[0] for f in same))
        return whole


CAPACITIES = (ENVS * 4, ENVS * 20, ENVS * 20 - 1, 10_000)
DTYPES = (torch.uint8, torch.uint16, torch.uint32, torch.bfloat16, torch.bool)


def restarted(replay: ReplayBuffer, pick: random.Random) -> ReplayBuffer:
    """Return a buffer that had other frames, or none, and loads this one's state."""
    other = ReplayBuffer(replay.frames, torch.device("cpu"), whole=False)
    if pick.random() < 0.5:
        other.extend(*Stream(99).batch(pick.choice(DTYPES)))
    other.whole = replay.whole
    other.load_state_dict(copy.deepcopy(replay.state_dict()))
    return other


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_draws_are_the_newest_frames_and_episodes(seed: int, whole: bool) -> None:
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    capacity, dtype = CAPACITIES[seed % 4], pick.choice(DTYPES)
    stream = Stream(seed)
    replay = restarted(ReplayBuffer(capacity, torch.device("cpu"), whole=whole), pick)
    drawn: set[tuple[int, ...]] = set()
    for number in range(1, 8):
        replay.whole = False  # Without the check that an episode has room.
        data, ends, ids = stream.batch(dtype)
        assert replay.extend(data, ends, ids) == int(ends.sum())
        replay.whole = whole
        length = min(-(-capacity // ENVS), number * FRAMES)
        newest = {(frame[0],) for row in stream.rows for frame in row[-length:]}
        assert len(replay) == len(newest)
        if pick.random() < 0.4:
            replay = restarted(replay, pick)
        expected = stream.episodes(length) if whole else newest
        if not expected:
            continue
        taken = replay.take(replay.draw(400 if whole else 3_000, generator))
        rows = zip(taken["number"].tolist(), taken["inside"].sum(1), strict=True)
        drawn = set()
        for row, count in rows:
            drawn.add(tuple(row[:count]))
            assert {*row[count:]} <= {row[count - 1]}  # The last frame again.
        assert drawn == expected
        assert torch.equal(taken["pair"][..., 1], -taken["number"].float())
        assert taken["small"].dtype == dtype
        small = (taken["number"] % 200).to(dtype)
        assert torch.equal(taken["small"].float(), small.float())
    assert drawn


def test_a_buffer_without_a_whole_episode_says_so() -> None:
    replay = ReplayBuffer(100, torch.device("cpu"), whole=True)
    data = {"number": torch.zeros(2, 5)}
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert replay.extend(data, torch.zeros(2, 5, dtype=torch.bool), ids) == 0
    with pytest.raises(ValueError, match="room for 50 frames of each environment"):
        replay.draw(1, torch.Generator())


def numbered(*lengths: int, first: int = 0) -> tuple[dict[str, Any], Any, Any]:
    """Return a batch of one environment, with episodes of these lengths."""
    count = sum(lengths)
    ends = torch.zeros(1, count, dtype=torch.bool)
    ends[0, torch.tensor(lengths).cumsum(0) - 1] = True
    ids = ends.cumsum(1) - ends.long()
    return {"number": torch.arange(first, first + count)[None]}, ends, ids


@pytest.mark.parametrize(
    ("before", "lengths"),
    [
        (0, (25,)),  # Longer than the ring.
        (8, (4, 10)),  # 12 frames, but 22 until the end of the batch.
    ],
)
def test_an_episode_that_is_overwritten_before_it_is_drawn_is_an_error(
    before: int, lengths: tuple[int, ...]
) -> None:
    replay = ReplayBuffer(20, torch.device("cpu"), whole=True)
    if before:
        begun = {"number": torch.arange(before)[None]}
        none = torch.zeros(1, before, dtype=torch.bool)
        replay.extend(begun, none, none.long())
    with pytest.raises(ValueError, match="does not fit.*value.buffer_frames=20"):
        replay.extend(*numbered(*lengths, first=before))


def test_an_episode_may_fill_the_whole_ring() -> None:
    replay = ReplayBuffer(20, torch.device("cpu"), whole=True)
    assert replay.extend(*numbered(20)) == 1
    data = replay.take(replay.draw(1, torch.Generator()))
    assert data["number"].tolist() == [list(range(20))]
