"""Value decomposition: agents in the mixture, targets, updates, exploration."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from workloads.counting import CountingEnv

from marl_collect import Collector, describe
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.value_decomposition import ValueLearner

HUNTERS = partial(CountingEnv, n_prey=0)
SETTINGS = {
    "num_cells": (8,),
    "value.minibatch_frames": 16,
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


@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-centralised-own"])
def test_an_update_moves_networks_targets_and_epsilon(name: str) -> None:
    learner = learner_of(name)
    before = [p.clone() for p in learner.parameters()]
    targets = [t.clone() for t in learner.unrolled["loss"].buffers()]
    metrics = learner.update(batch_of(learner), progress=0.5)
    assert metrics["epsilon"] == pytest.approx(1 - 0.3 * 0.95)
    (epsilon,) = [b for n, b in learner.policy.named_buffers() if "epsilon" in n]
    assert float(epsilon) == pytest.approx(metrics["epsilon"])
    assert not any(
        torch.equal(p, b) for p, b in zip(learner.parameters(), before, strict=True)
    )
    after = list(learner.unrolled["loss"].buffers())
    assert any(not torch.equal(t, b) for t, b in zip(after, targets, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-local-shared"])
def test_a_learner_on_a_gpu_updates_from_a_buffer_there(name: str) -> None:
    on_gpu, on_cpu = learner_of(name, device="cuda"), learner_of(name)
    batch = batch_of(on_cpu)
    losses = [
        learner.loss(learner.prepare(batch))[0].item() for learner in (on_gpu, on_cpu)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
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


def test_vdn_s_loss_sums_the_values_of_acting_agents() -> None:
    learner = learner_of("vdn-local-own", gamma=0.5, reward_scale=2.0)
    data = learner.prepare(batch_of(learner))
    assert not data["hunter", "mask"].all()
    with torch.no_grad():
        now = learner.values.module(data["hunter", "observation"])
        then = (
            learner.values.module(data["next", "hunter", "observation"]).max(-1).values
        )
        chosen = now.gather(-1, data["hunter", "action"].unsqueeze(-1)).squeeze(-1)
        value = (chosen * data["hunter", "mask"]).sum(-1)
        following = (then * data["next", "hunter", "mask"]).sum(-1)
        goes_on = ~data["next", "terminated"].squeeze(-1)
        wanted = data["next", "reward"].squeeze(-1) + 0.5 * following * goes_on
    loss, _ = learner.loss(data)
    torch.testing.assert_close(loss.detach(), (value - wanted).square().mean())


def test_a_truncated_agent_still_counts_in_the_next_value() -> None:
    learner = learner_of("vdn-local-own")
    batch = batch_of(learner)
    group = batch["next", "hunter"]
    batch["hunter", "mask"][0, 3] = True
    group["mask"][0, 3] = False
    group["truncated"][0, 3] = group["done"][0, 3] = True
    group["terminated"][0, 3, 0] = False
    group["terminated"][0, 3, 1] = True
    after = learner.prepare(batch)["next", "hunter", "mask"].view(1, 60, 2)
    assert after[0, 3].tolist() == [True, False]


def test_the_target_is_the_reward_of_the_whole_team() -> None:
    learner = learner_of("vdn-local-shared", reward_scale=2.0)
    batch = batch_of(learner)
    team = batch["next", "hunter", "reward"].sum(-2).reshape(-1, 1)
    torch.testing.assert_close(learner.prepare(batch)["next", "reward"], 2 * team)


IMAGES = partial(CountingEnv, n_prey=0, image=(32, 32, 3))


@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-local-own-ids"])
def test_images_and_dicts_are_read(name: str) -> None:
    learner = learner_of(name, IMAGES)
    metrics = learner.update(batch_of(learner, IMAGES), progress=1.0)
    assert metrics["loss"] > 0
    images = [n for n, _ in learner.values.module.named_parameters() if "images" in n]
    assert images
    if name.startswith("qmix"):
        assert any(p.grad.any() for p in learner.mixer.encoder.images.parameters())


def test_a_checkpoint_has_the_filled_rows_of_the_buffer(tmp_path: Path) -> None:
    name = "vdn-local-shared"
    learner = learner_of(name, **{"value.buffer_frames": 1_000_000})
    path = tmp_path / "state.pt"
    torch.save(learner_of(name).state_dict(), path)
    empty = path.stat().st_size
    batch = batch_of(learner)
    learner.update(batch, progress=0.5)
    torch.save(learner.state_dict(), path)
    assert path.stat().st_size < empty + 1_000_000  # A row has about 200 bytes.

    other = learner_of(name, **{"value.buffer_frames": 1_000_000})
    other.load_state_dict(torch.load(path, weights_only=True))
    for _ in range(2):  # Equal rows, equal draws, and the next batch at the same place.
        assert learner.update(batch, 1.0) == other.update(batch, 1.0)
    assert len(other._buffer) == 3 * len(batch.reshape(-1))


def test_recurrent_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="has no recurrent networks"):
        learner_of("vdn-local-shared", recurrent="gru")


def test_fewer_frames_than_before_training_are_refused() -> None:
    with pytest.raises(ValueError, match="frames is 100, but training begins after"):
        learner_of("vdn-local-shared", frames=100, **{"value.warm_up_frames": 101})
    learner_of("vdn-local-shared", frames=101, **{"value.warm_up_frames": 101})


def test_several_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="mixes one group, but there are hunter, prey"):
        learner_of("vdn-local-shared", CountingEnv)


def test_far_observations_do_not_raise_the_weights_of_the_mixture() -> None:
    learner = learner_of("qmix-local-shared")
    data = learner.prepare(batch_of(learner))["hunter", "observation"].float()

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
    data = small.prepare(batch_of(small))
    online = small._loss.mixer_network_params
    target = small._loss.target_mixer_network_params
    assert (online.data == target.data).all()
    with torch.no_grad():
        values = torch.zeros(60, 2, 1)
        observation = data["hunter", "observation"]
        one = small.mixer(values, observation)
        assert (small.mixer(values + 1, observation) > one).all()
