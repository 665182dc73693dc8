"""Learners of each kind: what the references of ``reference/`` do not compute."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv
from workloads.pair import PairEnv

from marl_collect import Collector, describe
from marl_collect.envs import PettingZooWrapper
from marl_collect.models import make_critic, make_policy, save_policy
from marl_collect.training import ppo
from marl_collect.training.advantages import TRAINED
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import make_learner

pytestmark = pytest.mark.processes

HUNTERS = partial(CountingEnv, n_prey=0)
IMAGES = partial(CountingEnv, image=(32, 32, 3))
SETTINGS = {
    "frames": 60,
    "gamma": 0.9,
    "num_cells": (8,),
    "reward_scale": 0.5,
    "ppo.lmbda": 0.8,
    "ppo.minibatch_frames": 16,
    "ppo.epochs": 2,
    "value.minibatch_frames": 16,
    "value.minibatch_episodes": 4,
    "value.warm_up_frames": 0,
    "value.epsilon_frames": 100,
}


def pair() -> PettingZooWrapper:
    return PettingZooWrapper(PairEnv(continuous=True))


def learner_of(factory: Any, name: str = "ippo-local-shared", **settings: Any) -> Any:
    options = TrainingOptions().with_settings(SETTINGS | settings)
    return make_learner(describe(factory), Setup.parse(name), options, 0)


def batch_of(factory: Any, learner: Any) -> Any:
    with Collector(factory, learner.policy, frames_per_batch=60, seed=1) as collector:
        return collector.next().clone()


def test_minibatches_have_a_seed_of_their_own() -> None:
    """The number is that of docs/architecture.md ("Seeds")."""
    assert learner_of(CountingEnv).generator.initial_seed() == 4890566965504419038


def test_metrics_are_means_over_groups_and_losses_are_sums() -> None:
    """Each group is seen alone if no row of the other is trained."""
    learner = learner_of(CountingEnv)
    batch = learner.prepare(batch_of(CountingEnv, learner)).reshape(-1)
    for group in ("hunter", "prey"):
        # The policies differ from those that acted, so that no metric is zero.
        batch[group, "action_log_prob"] -= 0.5 if group == "hunter" else 0.1

    def measured(*groups: str) -> tuple[Any, dict[str, Any]]:
        minibatch = batch.clone()
        for group in {"hunter", "prey"}.difference(groups):
            minibatch = minibatch.exclude((group, TRAINED))
        torch.manual_seed(0)
        loss, logged = learner.loss(minibatch)
        return loss.detach(), {name: float(value) for name, value in logged.items()}

    loss, logged = measured("hunter", "prey")
    (hunter_loss, hunter), (prey_loss, prey) = measured("hunter"), measured("prey")
    torch.testing.assert_close(loss, hunter_loss + prey_loss)
    assert {"kl_approx", "clip_fraction", "loss_objective"} <= logged.keys()
    for name in logged:
        if name not in ("entropy", "loss_entropy"):  # Drawn for actions in a Box.
            assert logged[name] == pytest.approx((hunter[name] + prey[name]) / 2), name
    assert hunter["kl_approx"] != pytest.approx(prey["kl_approx"])


@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("name", ["ippo-local-own", "mappo-centralised-shared"])
def test_orthogonal_weights_are_orthogonal(name: str, recurrent: str | None) -> None:
    settings: dict[str, Any] = {"ppo.orthogonal": True, "ppo.policy_gain": 0.05}
    settings |= {"activation": "relu", "recurrent": recurrent}
    learner = learner_of(CountingEnv, name, **settings)
    found = set()
    for network in learner.networks.values():
        for key, parameter in network.named_parameters():
            if key.endswith("bias"):
                assert not parameter.any()
                continue
            values = torch.linalg.svdvals(parameter.detach())
            torch.testing.assert_close(values, values.flatten()[0].expand_as(values))
            found.add(round(float(values.flatten()[0]), 4))
    # Outputs of the policy; of the critic, and within recurrent networks; the others.
    assert found == {0.05, 1.0, 1.4142}
    weights = [w for n, w in learner.policy.named_parameters() if "hunter" in n]
    last = next(w for w in reversed(weights) if w.any())
    assert float(torch.linalg.svdvals(last.detach()).max()) == pytest.approx(0.05)


def test_an_observation_that_is_not_finite_makes_no_weight_nan() -> None:
    learner = learner_of(CountingEnv)
    batch = batch_of(CountingEnv, learner)
    batch["hunter", "observation"][0, 3] = float("nan")
    with pytest.raises(ValueError, match="gradient of ippo-local-shared is NaN"):
        learner.update(batch, progress=0.0)
    assert all(p.isfinite().all() for p in learner.parameters())


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mappo-local-shared", {}),
        ("ippo-local-own", {"recurrent": "gru"}),
        ("mappo-centralised-shared", {}),
    ],
)
def test_a_gpu_learns_what_the_cpu_does(name: str, options: dict[str, Any]) -> None:
    on_gpu = learner_of(CountingEnv, name, device="cuda", **options)
    on_cpu = learner_of(CountingEnv, name, **options)
    batch = batch_of(CountingEnv, on_cpu)
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-3)
    assert all(p.is_cuda for p in on_gpu.parameters())
    prepared, expected = on_gpu.prepare(batch), on_cpu.prepare(batch)
    for group in ("hunter", "prey"):
        close(prepared[group, "advantage"].cpu(), expected[group, "advantage"])
    metrics = on_gpu.update(batch, progress=0.0)
    reference = on_cpu.update(batch, progress=0.0)
    for each in (metrics, reference):
        del each["entropy"]  # Of continuous actions: estimated from a device's draws.
    assert metrics == pytest.approx(reference, rel=1e-2, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_pictures_of_few_frames_are_criticised_at_once(
    recurrent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"recurrent": recurrent, "ppo.sequence_frames": 10}
    learner = learner_of(IMAGES, "mappo-local-shared", **settings)
    batch = batch_of(IMAGES, learner)
    groups = learner.description.groups
    observed = sum(batch[:1, :1][g].select("observation").bytes() for g in groups)
    monkeypatch.setattr(ppo, "_OBSERVED_AT_ONCE", 5 * observed + 1)
    sizes: list[int] = []
    hook = lambda _, args: sizes.append(args[0].numel())  # noqa: E731
    learner.critic.register_forward_pre_hook(hook)
    learner.prepare(batch)
    assert max(sizes) == 5
    assert sum(sizes) == 2 * batch.numel()


@pytest.mark.accelerator
@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-local-shared"])
def test_a_gpu_learns_from_a_buffer_there(name: str, recurrent: str | None) -> None:
    on_gpu = learner_of(HUNTERS, name, device="cuda", recurrent=recurrent)
    on_cpu = learner_of(HUNTERS, name, recurrent=recurrent)
    batch = batch_of(HUNTERS, on_cpu)
    before = [p.clone() for p in on_gpu.parameters()]
    assert all(p.is_cuda for p in before)
    for _ in range(2):  # The same frames are drawn.
        reference = pytest.approx(on_cpu.update(batch, progress=0.5), rel=1e-2)
        assert on_gpu.update(batch, progress=0.5) == reference
    assert not any(map(torch.equal, on_gpu.parameters(), before))
    on_cpu.load_state_dict(on_gpu.state_dict())
    for ours, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def test_a_batch_of_other_environments_is_an_error() -> None:
    learner = learner_of(HUNTERS, "vdn-local-shared")
    batch = batch_of(HUNTERS, learner)
    learner.remember(batch)
    with pytest.raises(ValueError, match="from 1 environments, but this one comes fro"):
        learner.remember(torch.cat([batch, batch]))


def test_gradient_steps_count_frames_or_episodes_across_batches() -> None:
    frames = learner_of(HUNTERS, "vdn-local-shared", **{"value.frames_per_update": 40})
    whole = learner_of(
        HUNTERS,
        "vdn-local-shared",
        **{"value.replay": "episodes", "value.episodes_per_update": 7},
    )
    batch = batch_of(HUNTERS, frames)
    ends = int(batch["next", "done"].sum())
    for number in (1, 2, 3):
        frames.update(batch, progress=1.0)
        whole.update(batch, progress=1.0)
        assert frames.updates == number * 60 // 40
        assert whole.updates == number * ends // 7


def test_a_checkpoint_has_the_filled_rows_of_the_buffer(tmp_path: Path) -> None:
    name = "vdn-local-shared"
    learner = learner_of(HUNTERS, name, **{"value.buffer_frames": 1_000_000})
    path = tmp_path / "state.pt"
    torch.save(learner_of(HUNTERS, name).state_dict(), path)
    empty = path.stat().st_size
    learner.update(batch_of(HUNTERS, learner), progress=0.5)
    torch.save(learner.state_dict(), path)
    assert path.stat().st_size < empty + 1_000_000  # A row has about 200 bytes.


def test_mixing_gain_scales_the_initial_weights_of_mixer_and_target() -> None:
    """Otherwise overestimated targets grow without bound."""
    full, small = (
        learner_of(HUNTERS, "qmix-local-shared", **{"value.mixing_gain": gain})
        for gain in (1.0, 0.25)
    )
    for name, wanted in full.mixer.state_dict().items():
        gain = 0.25 if name.endswith("weight") else 1.0
        torch.testing.assert_close(small.mixer.state_dict()[name], gain * wanted)
    online, target = small.online.parameters(), small.target.parameters()
    for ours, theirs in zip(online, target, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        values = torch.zeros(60, 2, 1)
        observation = batch_of(HUNTERS, small)["hunter", "observation"].reshape(
            60, 2, -1
        )
        one = small.mixer(values, observation)
        assert (small.mixer(values + 1, observation) > one).all()


def test_noise_stays_with_the_weights_of_another_learner(tmp_path: Path) -> None:
    name, saved = "maddpg-local-shared", tmp_path / "policy.pt"
    chosen = learner_of(pair, name).policy_options
    save_policy(saved, make_policy(pair, **chosen), pair, **chosen)
    for initial in (None, str(saved)):
        learner = learner_of(pair, name, initial=initial, **{"value.noise": 0.3})
        batch = batch_of(pair, learner)
        for updates in (0, 3):
            assert learner.updates == updates
            scale = learner.policy.get_dist(batch).scale
            assert scale.flatten().tolist() == pytest.approx([0.3] * 120)
            learner.update(batch, 1.0)


@pytest.mark.parametrize(
    ("factory", "name", "settings", "error", "message"),
    [
        (CountingEnv, "ippo", {"device": "meta"}, ValueError, "cannot be used: Tensor"),
        (
            *(HUNTERS, "vdn", {"recurrent": "gru", "value.replay": "frames"}),
            *(ValueError, "needs whole episodes, but value.replay is"),
        ),
        (
            *(HUNTERS, "vdn", {"value.warm_up_frames": 61}),
            *(ValueError, "frames is 60, but training begins after"),
        ),
        (CountingEnv, "vdn", {}, TypeError, "of one group, but there are hunter, prey"),
        (CountingEnv, "maddpg", {}, TypeError, "maddpg needs continuous actions"),
        *(
            (pair, "maddpg", {name: value}, ValueError, f"{name} is {value!r}, but mad")
            for name, value in (("recurrent", "gru"), ("last_action", True))
        ),
    ],
)
def test_what_a_learner_cannot_use_is_named(
    factory: Any, name: str, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        learner_of(factory, f"{name}-local-shared", **settings)


@pytest.mark.parametrize(("factory", "name"), [(HUNTERS, "iql"), (pair, "maddpg")])
def test_agents_that_wait_for_their_turn_are_refused(factory: Any, name: str) -> None:
    learner = learner_of(factory, f"{name}-local-shared")
    batch = batch_of(factory, learner)
    (group,) = learner.description.groups
    batch[group, "mask"] = torch.ones(batch[group, "done"].shape[:-1]).bool()
    batch[group, "mask"][0, 5, 1] = batch[group, "done"][0, 5, 1] = False
    with pytest.raises(ValueError, match="agents wait for their turn here. Use vdn"):
        learner.update(batch, 1.0)


def test_critics_of_discrete_actions_are_refused() -> None:
    with pytest.raises(TypeError, match="actions=True needs Box actions, but hunter"):
        make_critic(CountingEnv, actions=True)
