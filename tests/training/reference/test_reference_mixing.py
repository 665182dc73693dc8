"""VDN and QMIX equal a computation from their definitions, in cases drawn at random."""

import random
from functools import partial
from typing import Any

import pytest
import reference_mixing as reference
import torch
from drawn_env import DrawnEnv, Kind
from reference_networks import weights_of

pytest.importorskip("torchrl.objectives")

from marl_collect import Collector
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.value_decomposition import ValueLearner

CASES = 32
FRAMES = 60


def drawn(seed: int) -> tuple[Kind, Setup, dict[str, Any]]:
    """Draw an environment, a setup and settings."""
    pick = random.Random(seed)
    kind = Kind(
        groups={"red": pick.randint(1, 3)},
        turns=pick.random() < 0.4,
        deaths=pick.choice([0.0, 0.15]),
        returns=pick.choice([0.0, 0.3]),
        length=pick.choice([4, 7, 30]),
        truncates=pick.random() < 0.6,
        action_mask=pick.random() < 0.5,
        picture=pick.random() < 0.25,
        done_on_any=pick.random() < 0.2,
    )
    setup = Setup(
        pick.choice(["vdn", "qmix"]),
        centralised=pick.random() < 0.4,
        share_params=pick.random() < 0.5,
        agent_ids=pick.random() < 0.4,
    )
    settings = {
        "gamma": pick.choice([1.0, 0.95, 0.6]),
        "reward_scale": pick.choice([1.0, 0.3]),
        "num_cells": pick.choice([(5,), (7, 4)]),
        "conv": "2k8s8",
        "value.lr": 1e-3,
        "value.tau": pick.choice([0.1, 0.5]),
        "value.minibatch_frames": 30,
        "value.frames_per_update": 1_000,  # One step of the optimiser.
        "value.warm_up_frames": 0,
        "value.mixing_cells": 4,
        "value.mixing_gain": 1.0,
        "value.max_grad_norm": pick.choice([0.1, 100.0]),
    }
    return kind, setup, settings


close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


class Case:
    """A learner, the weights of its networks and targets, and a batch."""

    def __init__(self, seed: int) -> None:
        kind, setup, changed = drawn(seed)
        factory = partial(DrawnEnv, kind)
        options = TrainingOptions(frames=FRAMES).with_settings(changed)
        learner: Any = ValueLearner(factory().description, setup, options, seed=seed)
        with Collector(
            [factory] * 3, learner.policy, frames_per_batch=FRAMES, seed=seed
        ) as collector:
            self.batch = collector.next().clone()
        self.learner, self.value = learner, options.value
        self.modules = {"values": learner.values, "mixer": learner.mixer}
        self.target = {name: weights_of(m) for name, m in self.modules.items()}
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # Target networks have other weights.
            for weight in learner.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=noise)
        self.online = {name: weights_of(m) for name, m in self.modules.items()}
        self.parameters = [p for m in self.modules.values() for p in m.parameters()]
        self.settings = reference.Settings(
            group="red",
            qmix=setup.algorithm == "qmix",
            centralised=setup.centralised,
            ids=setup.agent_ids,
            gamma=options.gamma,
            scale=options.reward_scale,
        )

    def expected(self, rows: Any = slice(None)) -> tuple[Any, list[Any], list[Any]]:
        """Return the reference's loss, its weights, and their gradients or None."""
        flat = self.batch.reshape(-1)
        loss = reference.loss(self.online, self.target, flat, self.settings, rows)
        weights = [w for network in self.online.values() for w in network.values()]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        return loss.detach(), weights, list(gradients)


@pytest.mark.parametrize("seed", range(CASES))
def test_losses_and_gradients_equal_their_definition(seed: int) -> None:
    case = Case(seed)
    prepared = case.learner.prepare(case.batch)
    frames, _ = reference.transitions(case.batch.reshape(-1), case.settings)
    assert len(prepared) == len(frames)
    loss, _ = case.learner.loss(prepared)
    loss.backward()
    expected, _, gradients = case.expected()
    close(loss.detach().double(), expected)
    for gradient, parameter in zip(gradients, case.parameters, strict=True):
        nothing = torch.zeros_like(parameter)
        actual = nothing if parameter.grad is None else parameter.grad
        close(actual.double(), nothing.double() if gradient is None else gradient)


@pytest.mark.parametrize("seed", range(CASES))
def test_an_update_moves_weights_and_targets_by_definition(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(seed)
    rows = []
    sampled = case.learner._sample

    def sample() -> Any:
        minibatch = sampled()
        rows.append(minibatch["index"])
        return minibatch

    monkeypatch.setattr(case.learner, "_sample", sample)
    case.learner.update(case.batch, progress=1.0)
    (frames,) = rows
    assert len(frames) == case.value.minibatch_frames
    _, weights, gradients = case.expected(frames)
    norm = sum(float((g**2).sum()) for g in gradients if g is not None) ** 0.5
    factor = min(1.0, case.value.max_grad_norm / (norm + 1e-6))
    for weight, gradient, parameter in zip(
        weights, gradients, case.parameters, strict=True
    ):
        actual = parameter.detach().double()
        if gradient is None:
            close(actual, weight.detach())
            continue
        clipped = factor * gradient
        moved = weight.detach() - case.value.lr * clipped / (clipped.abs() + 1e-8)
        # Adam's first step has one size, also if the gradient is a rounding error.
        sure = clipped.abs() > 1e-4
        close(actual[sure], moved[sure], atol=1e-6)

    tau = case.value.tau
    for name, network in (("values", "local_value"), ("mixer", "mixer")):
        params = getattr(case.learner._loss, f"target_{network}_network_params")
        targets = params.data.flatten_keys(".")
        for key, parameter in case.modules[name].named_parameters():
            (actual_target,) = [
                value for k, value in targets.items() if k.endswith(f".{key}")
            ]
            mixed = (1 - tau) * case.target[name][key] + tau * parameter.double()
            close(actual_target.double(), mixed.detach())


def test_the_cases_have_everything() -> None:
    """Every choice is drawn, so that no comparison above is missing by chance."""
    cases = [drawn(seed) for seed in range(CASES)]
    for name in ("turns", "truncates", "action_mask", "picture", "done_on_any"):
        assert {getattr(kind, name) for kind, _, _ in cases} == {True, False}
    assert any(kind.turns and kind.deaths and kind.returns for kind, _, _ in cases)
    qmix = [(kind, a) for kind, a, _ in cases if a.algorithm == "qmix"]
    assert {kind.picture for kind, _ in qmix} == {True, False}
    assert any(kind.turns for kind, _ in qmix)
    setups = {(a.algorithm, a.centralised, a.share_params) for _, a, _ in cases}
    assert len(setups) == 8
