"""Every way of reading a dataset returns the collected data.

Frames, episodes, pieces of episodes, transitions over several frames, and all of them
normalised.
"""

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_streams import collected, write
from tensordict import TensorDict

from marl_collect import open_dataset

GAMMA = 0.9
PREY = ("prey", "observation")
MASK = ("collector", "mask")


@pytest.mark.parametrize("kind", ["transitions", "trajectories"])
def test_samples_are_uniform_and_reproducible(dataset: Any, kind: str) -> None:
    items = getattr(dataset, kind)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    indices = torch.randint(len(items), (50,), generator=generators[0])
    sample = items.sample(50, generator=generators[1])
    assert (sample == items.__getitems__(indices.tolist())).all()
    wrong: Any
    for wrong in (-1, "3", 1.5, True):
        with pytest.raises((TypeError, ValueError), match="n must be an integer"):
            items.sample(wrong)


def test_frames_are_read_in_any_order_as_copies(recording: Any, tmp_path: Path) -> None:
    transitions, flat = recording.dataset.transitions, recording.frames
    assert len(transitions) == len(flat) == 600
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    mixed = [torch.tensor(3), np.int32(4), -600, 5, 5]
    slices = slice(None), slice(10, 400, 7)
    for index in (*slices, -1, order, mask, mask.tolist(), mixed):
        chosen = torch.as_tensor(index) if isinstance(index, list) else index
        expected = flat[chosen]
        read = transitions[index]
        assert (read == expected).all()
        assert read.batch_size == expected.batch_size
        assert read["hunter"].batch_size == (*expected.batch_size, 2)
        read.zero_()
        assert (transitions[index] == expected).all()
    assert transitions[[]].shape == transitions[~mask & mask].shape == (0,)
    # The maps must not prevent pickling, nor be copied; nor our class loading.
    pickled = pickle.dumps(transitions)
    assert len(pickled) < 20_000 < recording.dataset.nbytes
    assert (pickle.loads(pickled)[:] == flat).all()
    transitions[:4].memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == flat[:4]).all()
    for number in (600, -601, [0, 600]):
        with pytest.raises(IndexError, match="Frame .* is out of range: there are 600"):
            transitions[number]
    for wrong in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[wrong]


def test_parts_by_return_are_ordered_and_complete(dataset: Any) -> None:
    episodes = dataset.trajectories
    parts = episodes.split_by_return()
    assert sum(map(len, parts)) == len(episodes)
    for below, above in pairwise(parts):
        assert below.returns.max() < above.returns.min()
    tied = episodes._take(np.zeros(10, np.int64))
    assert [len(part) for part in tied[:0].split_by_return()] == [0, 0, 0]
    assert sorted(map(len, tied[:1].split_by_return(np.array([0.5])))) == [0, 1]
    assert [len(part) for part in tied.split_by_return([0.8])] == [0, 10]
    wrong: Any
    for wrong in ([0.5, 0.5], [0], [0.5, 0.2], [1.0], 0.5, "1", [None]):
        with pytest.raises((TypeError, ValueError), match="quantiles must .*ascend"):
            episodes.split_by_return(wrong)


def test_a_selection_has_only_its_frames_and_keys(dataset: Any) -> None:
    episodes = dataset.trajectories
    short = episodes.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(episodes)
    assert short.lengths.max() <= 12
    assert (short.transitions[:] == torch.cat(list(short))).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")
    selection = episodes.select(("hunter", "observation"), "state", "next")[0]
    assert set(selection.keys()) == {"hunter", "state", "next"}
    assert set(selection["hunter"].keys()) == {"observation"}
    assert selection.names == ["time"]
    assert selection["hunter"].batch_size == (len(selection), 2)
    assert (selection == episodes[0].select(*selection.keys(True, True))).all()
    for index in ((n := len(episodes)), -n - 1):
        with pytest.raises(IndexError, match=f"Episode {index} is out of .* are {n}"):
            episodes[index]
    with pytest.raises(KeyError, match="There is no key hunter/position"):
        episodes.select(("hunter", "position"))


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("burn_in", [0, 3, 50])
def test_pieces_overlap_and_have_frames_in_front(
    dataset: Any, stride: int, burn_in: int
) -> None:
    episodes, length = dataset.trajectories[:12], 4
    sequences = episodes.sequences(length, stride=stride, burn_in=burn_in)
    remaining = iter(sequences)
    for episode in episodes:
        end = 0
        for begin in range(0, len(episode), stride):
            if end == len(episode):
                break
            end = min(begin + length, len(episode))
            sequence = next(remaining)
            padding = max(0, burn_in - begin)
            expected = episode[begin - burn_in + padding : end]
            columns = torch.arange(burn_in + length)
            mask = (padding <= columns) & (columns < padding + len(expected))
            assert torch.equal(sequence[MASK], mask)
            assert (sequence[mask].exclude(MASK) == expected).all()
            assert not sequence[~mask]["hunter", "observation"].any()
        assert end == len(episode)
    assert next(remaining, None) is None
    assert (sequences[-1] == sequences[len(sequences) - 1]).all()
    with pytest.raises(IndexError, match="is out of range"):
        sequences[len(sequences)]


@pytest.mark.parametrize("n", [1, 3])
def test_n_step_transitions_equal_a_loop_over_episodes(dataset: Any, n: int) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(n, gamma=GAMMA)
    assert len(steps) == trajectories.lengths.sum()
    items = iter(steps.__getitems__(list(range(len(steps)))))
    for episode in trajectories:
        after = episode["next"]
        for first in range(len(episode)):
            last = min(first + n, len(episode)) - 1
            count = last - first + 1
            item = next(items)
            assert item["steps_to_next_obs"].tolist() == [count]
            assert item["gamma"].item() == pytest.approx(GAMMA**count)
            assert (item["prey", "action"] == episode["prey", "action"][first]).all()
            assert (item["state"] == episode["state"][first]).all()
            assert (item["next", "state"] == after["state"][last]).all()
            assert (item["next", "done"] == after["done"][last]).all()
            for group in ("hunter", "prey"):
                rewards = after[group, "reward"][first : last + 1].double()
                total: Any = sum(GAMMA**i * r for i, r in enumerate(rewards))
                torch.testing.assert_close(item["next", group, "reward"], total.float())
    with pytest.raises(IndexError, match="out of range"):
        steps.__getitems__([len(steps)])


def test_normalised_items_have_the_moments_0_and_1(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments are over all frames and agents, whatever parts they are read in."""
    monkeypatch.setattr("marl_collect.storage.frames._PART", 100)
    frames, episodes = dataset.transitions, dataset.trajectories
    moments, raw = frames.moments(PREY, "state"), frames[:]
    (batch,) = frames.normalised(moments).loader(len(frames), shuffle=False)
    for key, values in ((PREY, raw[PREY].flatten(0, 1)), (("state",), raw["state"])):
        std, mean = torch.std_mean(values.double(), 0, correction=0)
        assert (std > 0).any()
        for name in (key, ("next", *key)):
            expected = ((raw[name] - mean) / std.clamp(min=1e-6)).float()
            torch.testing.assert_close(batch[name], expected)
    assert (batch["hunter", "observation"] == raw["hunter", "observation"]).all()
    chosen = episodes[:3].transitions
    mean = chosen[:]["state"].double().mean(0).float()
    torch.testing.assert_close(chosen.moments("state")["state",].mean, mean)
    # Padding stays zero.
    sequences = episodes.sequences(7, burn_in=2).normalised(moments)
    batch = sequences.__getitems__(list(range(len(sequences))))
    assert (~batch[MASK]).any()
    assert (batch[PREY][~batch[MASK]] == 0).all()
    with pytest.raises(KeyError, match="no key nothing"):
        frames.moments("nothing")
    with pytest.raises(KeyError, match="prey"):
        frames.select("hunter").normalised(moments)


def test_n_step_transitions_do_not_overwrite_a_group(tmp_path: Path) -> None:
    about, batches = collected(3, frames=30)
    for batch in batches:
        batch["gamma", "observation"] = torch.ones(*batch.shape, 2)
    write(tmp_path, batches, about)
    trajectories = open_dataset(tmp_path).trajectories
    with pytest.raises(ValueError, match=r"has keys under \['gamma'\]"):
        trajectories.n_step(2)
    some = trajectories.select("prey", ("next", "prey")).n_step(2)
    assert some[0]["gamma"].shape == (1,)
