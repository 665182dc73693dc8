"""Batches of whole episodes are those that the environments play, equally many each."""

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
