"""PPO for several agents: what the reference of ``reference/`` does not compute."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector, describe
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.groups import RESERVED
from marl_collect.training import ppo
from marl_collect.training.advantages import TRAINED
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner

pytestmark = pytest.mark.processes

GAMMA, LMBDA = 0.9, 0.8
SETTINGS = {
    "gamma": GAMMA,
    "ppo.lmbda": LMBDA,
    "num_cells": (8,),
    "ppo.minibatch_frames": 16,
    "ppo.epochs": 2,
    "reward_scale": 0.5,
}


def learner_of(factory: Any, name: Any = "ippo-local-shared", **settings: Any) -> Any:
    options = TrainingOptions().with_settings(SETTINGS | settings)
    return PPOLearner(describe(factory), Setup.parse(name), options, seed=0)


def batch_of(factory: Any, learner: Any, frames: int = 60) -> Any:
    with Collector(
        factory, learner.policy, frames_per_batch=frames, total_frames=frames, seed=1
    ) as collector:
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
def test_orthogonal_weights_have_one_singular_value(
    name: str, recurrent: str | None
) -> None:
    settings: dict[str, Any] = {"ppo.orthogonal": True, "ppo.policy_gain": 0.05}
    learner = learner_of(
        CountingEnv, name, activation="relu", recurrent=recurrent, **settings
    )
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


IMAGES = partial(CountingEnv, image=(32, 32, 3))


def test_an_observation_that_is_not_finite_makes_no_weight_nan() -> None:
    learner = learner_of(CountingEnv)
    batch = batch_of(CountingEnv, learner)
    batch["hunter", "observation"][0, 3] = float("nan")
    with pytest.raises(ValueError, match="gradient of ippo-local-shared is NaN"):
        learner.update(batch, progress=0.0)
    assert all(p.isfinite().all() for p in learner.parameters())


def test_a_device_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ValueError, match="device 'meta' cannot be used: Tensor"):
        learner_of(CountingEnv, device="meta")


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mappo-local-shared", {}),
        ("ippo-local-own", {"recurrent": "gru"}),
        ("mappo-centralised-shared", {}),
    ],
)
def test_a_learner_on_a_gpu_learns_what_one_on_the_cpu_does(
    name: str, options: dict[str, Any]
) -> None:
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


def test_the_learning_rate_decays_with_the_frames() -> None:
    learner = learner_of(CountingEnv, **{"ppo.anneal": True, "ppo.lr": 0.1})
    metrics = learner.update(batch_of(CountingEnv, learner), progress=0.75)
    assert metrics["lr"] == pytest.approx(0.025)


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
    learner.critic.register_forward_pre_hook(
        lambda module, args: sizes.append(args[0].numel())
    )
    learner.prepare(batch)
    assert max(sizes) == 5
    assert sum(sizes) == 2 * batch.numel()


NAMES = sorted({*dir(nn.Module()), *dir(nn.ModuleDict())} - RESERVED)


@pytest.mark.parametrize("setup", ["ippo-local-shared", "mappo-local-shared"])
def test_groups_may_have_the_names_of_attributes_of_modules(setup: str) -> None:
    box, size = spaces.Box(0, 9, (2,), np.float32), [1, 12, 1]
    flags = dict.fromkeys(("done", "terminated", "truncated"), torch.zeros(1, 12, 1, 1))
    flags = {key: flag.bool() for key, flag in flags.items()}
    for start in range(0, len(NAMES), 20):
        names = [*NAMES[start : start + 20], "team.red"]
        description = EnvDescription(
            "named",
            {n: GroupDescription((f"{n}_0",), box, spaces.Discrete(2)) for n in names},
        )
        options = TrainingOptions().with_settings(SETTINGS)
        learner = PPOLearner(description, Setup.parse(setup), options, seed=0)

        def frames(names: list[str] = names, **more: Any) -> Any:
            leaves = {"observation": torch.rand(*size, 2), **flags, **more}
            groups = {n: TensorDict(dict(leaves), size) for n in names}
            return TensorDict({**groups, "done": flags["done"][..., 0]}, size[:2])

        with torch.no_grad():
            batch = learner.policy(frames())
        batch["next"] = frames(reward=torch.rand(*size, 1))
        batch["next", "terminated"] = batch["next", "done"]
        before = [p.clone() for p in learner.parameters()]
        metrics = learner.update(batch, 0.0)
        assert metrics["grad_norm"] > 0
        after = list(learner.parameters())
        changed = [bool((a != b).any()) for a, b in zip(after, before, strict=True)]
        assert all(changed)
