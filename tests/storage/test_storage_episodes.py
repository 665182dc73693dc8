"""The episodes found in batches equal those that the collector counts."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.storage.episodes import EpisodeFinder


def stream(
    rewards: list[list[float]], done: list[list[int]], **extra: Any
) -> TensorDict:
    """A batch of one group with one agent per reward column."""
    flags = torch.tensor(done, dtype=torch.bool).unsqueeze(-1)
    size, frames = flags.shape[:2]
    reward = torch.tensor(rewards).reshape(size, frames, 1, 1)
    return TensorDict(
        {
            "next": {
                "done": flags,
                "terminated": flags,
                "g": TensorDict({"reward": reward}, [size, frames, 1]),
            },
            **extra,
        },
        [size, frames],
    )


def test_an_episode_across_batches_is_one_episode() -> None:
    finder = EpisodeFinder()
    no, yes = False, True
    assert not finder.add(stream([[1.0, 2.0]], [[no, no]]))
    (episode,) = finder.add(stream([[4.0, 8.0]], [[yes, no]]))
    assert (episode.length, episode.frame, episode.returns) == (3, 0, {"g": (7.0,)})
    (episode,) = finder.add(stream([[16.0, 32.0]], [[no, yes]]))
    assert (episode.length, episode.frame, episode.returns) == (3, 1, {"g": (56.0,)})
    assert episode.terminated


def test_rows_are_independent_and_several_episodes_may_end_in_one_batch() -> None:
    finder = EpisodeFinder()
    batch = stream([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 0], [0, 0, 1]])
    episodes = finder.add(batch)
    assert [(e.environment, e.frame, e.length) for e in episodes] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 2, 3),
    ]
    assert [e.team_return for e in episodes] == [1.0, 2.0, 15.0]
    assert episodes[-1] == list(episodes)[2]
    assert list(episodes[1:]) == list(episodes)[1:]
    with pytest.raises(IndexError):
        _ = episodes[3]


def test_an_abandoned_episode_is_not_mixed_with_the_next_one() -> None:
    finder = EpisodeFinder()
    ids = [torch.full((1, 2), i) for i in (0, 1)]
    finder.add(stream([[1.0, 1.0]], [[0, 0]], collector={"traj_ids": ids[0]}))
    batch = stream([[1.0, 1.0]], [[0, 1]], collector={"traj_ids": ids[1]})
    (episode,) = finder.add(batch)
    assert episode.length == 2
    assert episode.team_return == 2.0


def test_invalid_frames_are_ignored() -> None:
    finder = EpisodeFinder()
    mask = torch.tensor([[True, True, False]])
    batch = stream([[1.0, 2.0, 9.0]], [[0, 0, 1]], collector={"mask": mask})
    assert not finder.add(batch)
    (episode,) = finder.add(stream([[4.0]], [[1]]))
    assert (episode.length, episode.team_return) == (3, 7.0)


@pytest.mark.parametrize("frames", [6, 14, 60])
def test_lengths_and_returns_equal_the_collectors(frames: int) -> None:
    collector = Collector(
        [CountingEnv] * 3,
        frames_per_batch=3 * frames,
        total_frames=3 * 120,
        max_frames_per_traj=7,
        seed=0,
    )
    finder = EpisodeFinder()
    episodes = [episode for batch in collector for episode in finder.add(batch)]
    stats = collector.stats()
    assert len(episodes) == stats["episodes"] > 0
    team = sum(e.team_return for e in episodes[-100:]) / len(episodes[-100:])
    assert team == pytest.approx(stats["episode_return_team"])


def of_episode(environment: int, episode: int, *, done: bool = False) -> TensorDict:
    """Two frames of one episode; the second may end it."""
    ids = torch.full((1, 2), (environment << 32) + episode)
    return stream([[1.0, 1.0]], [[False, done]], collector={"traj_ids": ids})


def test_environments_may_share_a_row_if_no_episode_is_interrupted() -> None:
    finder = EpisodeFinder()
    finder.add(of_episode(0, 0))  # Abandoned by a reset.
    episodes = [
        *finder.add(of_episode(1, 0, done=True)),
        *finder.add(of_episode(0, 1, done=True)),
        *finder.add(of_episode(0, 0, done=True)),  # Numbered again from 0.
    ]
    assert [episode.length for episode in episodes] == [2, 2, 2]
    finder.add(of_episode(0, 3))
    finder.add(of_episode(1, 1))  # Another worker's batch.
    with pytest.raises(
        ValueError, match="Episode 3 of environment 0 continues in row 0"
    ):
        finder.add(of_episode(0, 3, done=True))


def test_an_episode_that_continues_in_another_row_is_refused() -> None:
    finder = EpisodeFinder()
    pair = [of_episode(0, 0), of_episode(1, 0)]
    finder.add(torch.cat(pair))
    with pytest.raises(ValueError, match="environment 1 continues in row 0"):
        finder.add(pair[1])


@pytest.mark.parametrize("seed", range(20))
def test_random_rows_give_the_episodes_of_a_plain_loop(seed: int) -> None:
    """Rows have different numbers of valid frames, and may lack their beginning."""
    generator = torch.Generator().manual_seed(seed)
    finder = EpisodeFinder()
    lengths, sums, is_complete = [0] * 3, [0.0] * 3, [True] * 3
    for batch in range(6):
        frames = int(torch.randint(1, 6, (), generator=generator))
        rewards = torch.randint(-9, 9, (3, frames), generator=generator).float()
        done = torch.rand(3, frames, generator=generator) < 0.4
        counts = torch.randint(0, frames + 1, (3, 1), generator=generator)
        mask = torch.arange(frames) < counts
        is_init = torch.rand(3, frames, 1, generator=generator) < 0.8
        transitions = stream(
            rewards.tolist(),
            done.int().tolist(),
            collector={"mask": mask},
            is_init=is_init,
        )
        expected = []
        for b, t in mask.nonzero().tolist():
            if not lengths[b]:
                is_complete[b] = bool(is_init[b, t])
            lengths[b] += 1
            sums[b] += float(rewards[b, t])
            if done[b, t]:
                if is_complete[b]:
                    expected.append((b, t, lengths[b], {"g": (sums[b],)}))
                lengths[b], sums[b] = 0, 0.0
        actual = finder.add(transitions)
        assert [
            (e.environment, e.frame, e.length, e.returns) for e in actual
        ] == expected, batch
