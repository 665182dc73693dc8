"""Sequences of frames, transitions over several frames, and normalised values."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from marl_collect.storage import Dataset

GAMMA = 0.9
PREY = ("prey", "observation")


@pytest.fixture
def dataset(recording: Any) -> Dataset:
    """Episodes that cross batches."""
    chosen: Dataset = recording.dataset
    return chosen


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("burn_in", [0, 3, 50])
def test_pieces_overlap_and_have_frames_in_front(
    dataset: Dataset, stride: int, burn_in: int
) -> None:
    episodes, length = dataset.trajectories[:12], 4
    all_sequences = iter(episodes.sequences(length, stride=stride, burn_in=burn_in))
    for episode in episodes:
        end = 0
        for begin in range(0, len(episode), stride):
            if end == len(episode):
                break
            end = min(begin + length, len(episode))
            sequence = next(all_sequences)
            padding = max(0, burn_in - begin)
            expected = episode[begin - burn_in + padding : end]
            assert sequence.shape == (burn_in + length,)
            mask = sequence["collector", "mask"]
            columns = torch.arange(burn_in + length)
            valid = (padding <= columns) & (columns < padding + len(expected))
            assert torch.equal(mask, valid)
            valid_frames = sequence[mask].exclude(("collector", "mask"))
            assert (valid_frames == expected).all()
            assert not sequence[~mask]["hunter", "observation"].any()
        assert end == len(episode)
    assert next(all_sequences, None) is None
    sequences = episodes.sequences(length, stride=stride, burn_in=burn_in)
    assert (sequences[-1] == sequences[len(sequences) - 1]).all()
    with pytest.raises(IndexError, match="is out of range"):
        sequences[len(sequences)]


def expected_step(
    episode: TensorDict, first: int, n: int
) -> tuple[int, dict[str, Any]]:
    """Return the last frame of a transition, and the discounted rewards."""
    last = min(first + n, len(episode)) - 1
    rewards = {
        group: sum(
            GAMMA**i * episode["next", group, "reward"][first + i].double()
            for i in range(last - first + 1)
        )
        for group in ("hunter", "prey")
    }
    return last, rewards


@pytest.mark.parametrize("n", [1, 3])
def test_n_step_transitions_equal_a_loop_over_episodes(
    dataset: Dataset, n: int
) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(n, gamma=GAMMA)
    assert len(steps) == trajectories.lengths.sum()
    items = steps.__getitems__(list(range(len(steps))))
    number = 0
    for episode in trajectories:
        for first in range(len(episode)):
            last, rewards = expected_step(episode, first, n)
            item = items[number]
            number += 1
            assert item["steps_to_next_obs"].tolist() == [last - first + 1]
            assert item["gamma"].item() == pytest.approx(GAMMA ** (last - first + 1))
            assert (item["prey", "action"] == episode["prey", "action"][first]).all()
            assert (item["state"] == episode["state"][first]).all()
            assert (item["next", "state"] == episode["next", "state"][last]).all()
            assert (item["next", "done"] == episode["next", "done"][last]).all()
            for group, total in rewards.items():
                torch.testing.assert_close(item["next", group, "reward"], total.float())
    assert number == len(steps)
    with pytest.raises(IndexError, match="out of range"):
        steps.__getitems__([number])


def test_normalised_items_have_the_moments_0_and_1(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments are over all frames and agents, whatever parts they are read in."""
    monkeypatch.setattr("marl_collect.storage.frames._PART", 100)
    frames = dataset.transitions
    moments, raw = frames.moments(PREY, "state"), frames[:]
    (batch,) = frames.normalised(moments).loader(len(frames), shuffle=False)
    for key, values in ((PREY, raw[PREY].flatten(0, 1)), (("state",), raw["state"])):
        std, mean = torch.std_mean(values.double(), 0, correction=0)
        assert (std > 0).any()
        for name in (key, ("next", *key)):
            expected = ((raw[name] - mean) / std.clamp(min=1e-6)).float()
            torch.testing.assert_close(batch[name], expected)
    assert (batch["hunter", "observation"] == raw["hunter", "observation"]).all()
    chosen = dataset.trajectories[:3].transitions
    mean = chosen[:]["state"].double().mean(0).float()
    torch.testing.assert_close(chosen.moments("state")["state",].mean, mean)
    # Padding stays zero.
    sequences = dataset.trajectories.sequences(7, burn_in=2).normalised(moments)
    batch = sequences.__getitems__(list(range(len(sequences))))
    padding = ~batch["collector", "mask"]
    assert padding.any()
    assert (batch[PREY][padding] == 0).all()
    with pytest.raises(KeyError, match="no key nothing"):
        frames.moments("nothing")
    with pytest.raises(KeyError, match="prey"):
        frames.select("hunter").normalised(moments)
