"""Transitions over several frames, and normalised values."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.storage import Dataset, DatasetDescription, Writer

N, GAMMA = 3, 0.9


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Episodes that cross batches."""
    path = tmp_path_factory.mktemp("data") / "d"
    collector = Collector(
        [lambda: CountingEnv(state=True)] * 2,
        frames_per_batch=20,
        total_frames=400,
        seed=0,
    )
    about = DatasetDescription("counting", collector.description)
    with Writer(path, about) as writer:
        for batch in collector:
            writer.add(batch)
    return open_dataset(path)


def expected_step(episode: TensorDict, first: int) -> tuple[int, dict[str, Any]]:
    """Return the last frame of a transition, and the discounted rewards."""
    last = min(first + N, len(episode)) - 1
    rewards = {
        group: sum(
            GAMMA**i * episode["next", group, "reward"][first + i].double()
            for i in range(last - first + 1)
        )
        for group in ("hunter", "prey")
    }
    return last, rewards


def test_n_step_transitions_equal_a_loop_over_episodes(dataset: Dataset) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(N, gamma=GAMMA)
    assert len(steps) == trajectories.lengths.sum()
    items = steps.__getitems__(list(range(len(steps))))
    number = 0
    for episode in trajectories:
        for first in range(len(episode)):
            last, rewards = expected_step(episode, first)
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


def test_one_step_is_the_transition_itself(dataset: Dataset) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(1, gamma=GAMMA)
    numbers = [0, 5, 17, len(steps) - 1]
    transitions = steps.__getitems__(numbers).exclude("gamma", "steps_to_next_obs")
    assert (transitions == trajectories.transitions[numbers]).all()


def test_n_step_transitions_are_loaded_in_epochs(dataset: Dataset) -> None:
    selection = dataset.trajectories.select(
        "state", ("next", "hunter", "reward"), "next"
    )
    loader = selection.n_step(2).loader(16, seed=0)
    batches = list(loader)
    assert sum(len(batch) for batch in batches) == len(selection.transitions)
    assert "hunter" not in batches[0].keys()


@pytest.mark.parametrize(
    ("n", "gamma", "message"),
    [(0, 0.9, "n must be at least 1"), (2, 1.5, "gamma must be between 0 and 1")],
)
def test_wrong_arguments_are_refused(
    dataset: Dataset, n: int, gamma: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.trajectories.n_step(n, gamma=gamma)


def test_n_step_needs_rewards_and_frames_that_exist(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="No reward is selected"):
        dataset.trajectories.select("state").n_step(2)
    with pytest.raises(IndexError, match="out of range"):
        dataset.trajectories.n_step(2).__getitems__([10**6])


def test_moments_are_those_of_all_frames_and_agents(dataset: Dataset) -> None:
    frames = dataset.transitions
    moments = frames.moments(("prey", "observation"), "state")
    all_frames = frames[:]
    for key, values in (
        (
            ("prey", "observation"),
            all_frames["prey", "observation"].double().flatten(0, 1),
        ),
        (("state",), all_frames["state"].double()),
    ):
        torch.testing.assert_close(moments[key].mean, values.mean(0).float())
        torch.testing.assert_close(
            moments[key].std, values.std(0, unbiased=False).float()
        )


def test_normalised_items_have_mean_0_and_deviation_1(dataset: Dataset) -> None:
    frames = dataset.transitions
    moments = frames.moments(("prey", "observation"))
    scaled = frames.normalised(moments)
    assert len(scaled) == len(frames)
    (batch,) = scaled.loader(len(frames), shuffle=False)
    values = batch["prey", "observation"].flatten(0, 1)
    varies = moments["prey", "observation"].std > 0
    assert varies.any()
    assert values.dtype == torch.float32
    torch.testing.assert_close(
        values.mean(0), torch.zeros_like(values[0]), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        values.std(0, unbiased=False)[varies], torch.ones_like(values[0])[varies]
    )
    raw = frames[:]
    after = (
        raw["next", "prey", "observation"] - moments["prey", "observation"].mean
    ) / moments["prey", "observation"].std.clamp(min=1e-6)
    torch.testing.assert_close(batch["next", "prey", "observation"], after)
    assert (batch["hunter", "observation"] == raw["hunter", "observation"]).all()


def test_padding_of_normalised_sequences_stays_zero(dataset: Dataset) -> None:
    moments = dataset.transitions.moments(("prey", "observation"))
    sequences = dataset.trajectories.sequences(7, burn_in=2).normalised(moments)
    batch = sequences.__getitems__(list(range(len(sequences))))
    padding = ~batch["collector", "mask"]
    assert padding.any()
    assert (batch["prey", "observation"][padding] == 0).all()


def test_keys_that_do_not_exist_are_named(dataset: Dataset) -> None:
    with pytest.raises(KeyError, match="no key nothing"):
        dataset.transitions.moments("nothing")
    moments = dataset.transitions.moments("state")
    with pytest.raises(KeyError, match="state"):
        dataset.transitions.select("prey").normalised(moments)
