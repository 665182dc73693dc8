"""Values of actions: agents in the mixture, targets, updates, exploration."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import Collector, describe
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.value_decomposition import ValueLearner

pytestmark = pytest.mark.processes

HUNTERS = partial(CountingEnv, n_prey=0)
SETTINGS = {
    "num_cells": (8,),
    "value.minibatch_frames": 16,
    "value.minibatch_episodes": 4,
    "value.warm_up_frames": 0,
    "value.epsilon_frames": 100,
}


def learner_of(name: str, factory: Any = HUNTERS, **settings: Any) -> Any:
    options = TrainingOptions(frames=60).with_settings(SETTINGS | settings)
    return ValueLearner(describe(factory), Setup.parse(name), options, seed=0)


def batch_of(learner: Any, factory: Any = HUNTERS) -> Any:
    with Collector(
        factory, learner.policy, frames_per_batch=60, total_frames=60, seed=1
    ) as collector:
        return collector.next().clone()


@pytest.mark.accelerator
@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-local-shared"])
def test_a_learner_on_a_gpu_updates_from_a_buffer_there(
    name: str, recurrent: str | None
) -> None:
    on_gpu = learner_of(name, device="cuda", recurrent=recurrent)
    on_cpu = learner_of(name, recurrent=recurrent)
    batch = batch_of(on_cpu)
    before = [p.clone() for p in on_gpu.parameters()]
    assert all(p.is_cuda for p in before)
    for _ in range(2):  # The same frames are drawn.
        reference = pytest.approx(on_cpu.update(batch, progress=0.5), rel=1e-2)
        assert on_gpu.update(batch, progress=0.5) == reference
    assert not any(
        torch.equal(p, b) for p, b in zip(on_gpu.parameters(), before, strict=True)
    )
    on_cpu.load_state_dict(on_gpu.state_dict())
    for ours, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def test_iql_refuses_agents_that_wait_for_their_turn() -> None:
    learner = learner_of("iql-local-shared")
    batch = batch_of(learner)
    batch["hunter", "mask"][0, 5, 1] = False
    batch["hunter", "done"][0, 5, 1] = False
    with pytest.raises(ValueError, match="agents wait for their turn here. Use vdn"):
        learner.update(batch, progress=1.0)


def test_an_episode_that_does_not_fit_into_the_buffer_is_an_error() -> None:
    settings = {"value.buffer_frames": 3, "recurrent": "gru"}
    learner = learner_of("vdn-local-shared", **settings)
    batch = batch_of(learner)
    batch["next", "done"][:] = False
    with pytest.raises(ValueError, match="has more than 3 frames, so it does n"):
        learner.update(batch, progress=1.0)


def test_a_batch_of_other_environments_is_an_error() -> None:
    learner = learner_of("vdn-local-shared")
    batch = batch_of(learner)
    learner.remember(batch)
    with pytest.raises(ValueError, match="from 1 environments, but this one comes fro"):
        learner.remember(torch.cat([batch, batch]))


def test_gradient_steps_count_frames_or_episodes_across_batches() -> None:
    frames = learner_of("vdn-local-shared", **{"value.frames_per_update": 40})
    whole = learner_of(
        "vdn-local-shared",
        **{"value.replay": "episodes", "value.episodes_per_update": 7},
    )
    batch = batch_of(frames)
    ends = int(batch["next", "done"].sum())
    for number in (1, 2, 3):
        frames.update(batch, progress=1.0)
        whole.update(batch, progress=1.0)
        assert frames.updates == number * 60 // 40
        assert whole.updates == number * ends // 7


def test_a_checkpoint_has_the_filled_rows_of_the_buffer(tmp_path: Path) -> None:
    name = "vdn-local-shared"
    learner = learner_of(name, **{"value.buffer_frames": 1_000_000})
    path = tmp_path / "state.pt"
    torch.save(learner_of(name).state_dict(), path)
    empty = path.stat().st_size
    learner.update(batch_of(learner), progress=0.5)
    torch.save(learner.state_dict(), path)
    assert path.stat().st_size < empty + 1_000_000  # A row has about 200 bytes.


def test_recurrent_networks_are_not_trained_on_frames() -> None:
    settings = {"recurrent": "gru", "value.replay": "frames"}
    with pytest.raises(ValueError, match="needs whole episodes, but value.replay is"):
        learner_of("vdn-local-shared", **settings)


def test_fewer_frames_than_before_training_are_refused() -> None:
    with pytest.raises(ValueError, match="frames is 100, but training begins after"):
        learner_of("vdn-local-shared", frames=100, **{"value.warm_up_frames": 101})
    learner_of("vdn-local-shared", frames=101, **{"value.warm_up_frames": 101})


def test_several_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="of one group, but there are hunter, prey"):
        learner_of("vdn-local-shared", CountingEnv)


def test_far_observations_do_not_raise_the_weights_of_the_mixture() -> None:
    learner = learner_of("qmix-local-shared")
    data = batch_of(learner)["hunter", "observation"].reshape(60, 2, -1).float()

    def weights(observation: Any) -> Any:
        values = torch.ones(*observation.shape[:-1], 1, requires_grad=True)
        team = learner.mixer(values, observation).sum()
        return torch.autograd.grad(team, values)[0]

    assert weights(1000 * data).max() <= 1.1 * weights(data + 1e-3).max()


def test_mixing_gain_scales_the_initial_weights_of_mixer_and_target() -> None:
    """Otherwise overestimated targets grow without bound."""
    full, small = (
        learner_of("qmix-local-shared", **{"value.mixing_gain": gain})
        for gain in (1.0, 0.25)
    )
    for name, wanted in full.mixer.state_dict().items():
        gain = 0.25 if name.endswith("weight") else 1.0
        torch.testing.assert_close(small.mixer.state_dict()[name], gain * wanted)
    for ours, theirs in zip(
        small.online.parameters(), small.target.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        values = torch.zeros(60, 2, 1)
        observation = batch_of(small)["hunter", "observation"].reshape(60, 2, -1)
        one = small.mixer(values, observation)
        assert (small.mixer(values + 1, observation) > one).all()
