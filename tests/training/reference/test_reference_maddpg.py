"""MADDPG and IDDPG equal a computation from their definitions, in drawn cases."""

import random
from functools import partial
from typing import Any

import pytest
import reference_maddpg as reference
import torch
from drawn_env import DrawnEnv, Kind, assert_varied, draw_kind, draw_setup, noted_draws
from reference_networks import settings_of, weights_of

from marl_collect import Collector
from marl_collect.training.maddpg import MADDPGLearner
from marl_collect.training.options import Setup, TrainingOptions

pytestmark = pytest.mark.processes

CASES = 24
ENVIRONMENTS, FRAMES = 3, 40


def drawn(seed: int) -> tuple[Kind, Setup, dict[str, Any]]:
    """Draw an environment, a setup and settings."""
    pick = random.Random(seed)
    groups = {"red": pick.randint(1, 3)}
    if pick.random() < 0.5:
        groups["blue"] = pick.randint(1, 2)
    kind = draw_kind(pick, groups, discrete=False, continuous=tuple(groups))
    setup = draw_setup(pick, pick.choice(["maddpg", "maddpg", "iddpg"]))
    sees_several = setup.centralised or setup.algorithm == "maddpg"
    return (
        kind,
        setup,
        {
            "gamma": pick.choice([1.0, 0.95, 0.6]),
            "reward": pick.choice(["agent", "team"]),
            "reward_scale": pick.choice([1.0, 0.3]),
            "standardise_rewards": pick.random() < 0.4,
            "bootstrap_limits": pick.random() < 0.6,
            "num_cells": pick.choice([(5,), (7, 4)]),
            "conv": "2k8s8",
            "network": pick.choice([None, "attention"]) if sees_several else None,
            "value.lr": 1e-3,
            "value.policy_lr": pick.choice([None, 3e-3]),
            "value.tau": pick.choice([0.1, 1.0]),
            "value.target_interval": pick.choice([1, 2]),
            "value.noise": pick.choice([0.1, 1.5]),
            "value.action_penalty": pick.choice([0.0, 0.2]),
            "value.minibatch_frames": 30,
            "value.frames_per_update": ENVIRONMENTS * FRAMES,
            "value.warm_up_frames": 0,
            "value.max_grad_norm": pick.choice([0.1, 100.0]),
        },
    )


close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


class Case:
    """A learner, the weights of its networks and targets, and a batch."""

    def __init__(self, seed: int) -> None:
        kind, setup, changed = drawn(seed)
        factory, frames = partial(DrawnEnv, kind), ENVIRONMENTS * FRAMES
        self.options = TrainingOptions(frames=frames).with_settings(changed)
        self.learner: Any = MADDPGLearner(
            factory().description, setup, self.options, seed=seed
        )
        with Collector(
            [factory] * ENVIRONMENTS,
            self.learner.policy,
            frames_per_batch=frames,
            seed=seed,
        ) as collector:
            self.batch = collector.next().clone()
        modules = self.learner.networks
        self.target = {name: weights_of(m) for name, m in modules.items()}
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # Target networks have other weights.
            for weight in self.learner.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
        self.online = {name: weights_of(m) for name, m in modules.items()}
        self.settings = settings_of(
            setup,
            self.options,
            self.options.value,
            groups=kind.groups,
            central=setup.algorithm == "maddpg",
            remembers=False,
        )

    def expected(self, frames: list[tuple[int, int]]) -> tuple[Any, dict[str, Any]]:
        """Return the losses, and the gradients of each network's weights by name."""
        critic, policy = reference.losses(
            self.online, self.target, self.batch, self.settings, frames
        )
        gradients = {}
        for name, loss in (("critic", critic), ("policy", policy)):
            weights = self.online[name]
            slopes = torch.autograd.grad(
                loss, list(weights.values()), materialize_grads=True
            )
            gradients[name] = dict(zip(weights, slopes, strict=True))
        return (critic.detach(), policy.detach()), gradients


@pytest.mark.parametrize("seed", range(CASES))
def test_losses_and_gradients_equal_their_definition(seed: int) -> None:
    case = Case(seed)
    case.learner.remember(case.batch)
    frames = [(b, t) for b in range(ENVIRONMENTS) for t in range(FRAMES)]
    rows = torch.tensor([(b, t, 1) for b, t in frames])
    loss, logged = case.learner.loss(case.learner.replay.take(rows))
    loss.backward()
    losses, gradients = case.expected(frames)
    close(logged["loss_critic"].double(), losses[0])
    close(logged["loss_objective"].double(), losses[1])
    for name, module in case.learner.networks.items():
        for key, parameter in module.named_parameters():
            close(parameter.grad.double(), gradients[name][key])


@pytest.mark.parametrize("seed", range(CASES))
def test_updates_equal_definitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed)
    taken = noted_draws(case.learner, monkeypatch)
    case.learner.update(case.batch, progress=1.0)
    frames = [(b, t) for b, t, _ in taken.pop()]
    assert not taken
    assert len(frames) == 30
    _, gradients = case.expected(frames)
    value = case.options.value
    rates = {"critic": value.lr, "policy": value.policy_lr or value.lr}
    tau = value.tau if value.target_interval == 1 else 0.0
    targets = dict(case.learner.untrained["targets"].named_parameters())
    for name, module in case.learner.networks.items():
        norm = sum(float((g**2).sum()) for g in gradients[name].values()) ** 0.5
        factor = min(1.0, value.max_grad_norm / (norm + 1e-6))
        for key, parameter in module.named_parameters():
            clipped = factor * gradients[name][key]
            step = rates[name] * clipped / (clipped.abs() + 1e-8)
            moved = case.online[name][key].detach() - step
            # Adam's first step has one size, also if the gradient is a rounding error.
            sure = clipped.abs() > 1e-4
            actual = parameter.detach().double()
            close(actual[sure], moved[sure], atol=1e-6)
            mixed = (1 - tau) * case.target[name][key] + tau * actual
            close(targets[f"{name}.{key}"].double(), mixed.detach())


def test_the_cases_have_everything() -> None:
    """Every choice is drawn, so that no comparison above is missing by chance."""
    cases = []
    for seed in range(CASES):
        kind, setup, settings = drawn(seed)
        cases.append(vars(kind) | vars(setup) | settings)
        cases[-1]["several"] = len(kind.groups) > 1
    every = "several truncates deaths share_params reward bootstrap_limits"
    for algorithm in ("maddpg", "iddpg"):
        some = [case for case in cases if case["algorithm"] == algorithm]
        assert_varied(some, {"": f"{every} standardise_rewards"})
    assert_varied(cases, {"": "network", "network": "agent_ids"})
    assert any(case["picture"] and not case["network"] for case in cases)
