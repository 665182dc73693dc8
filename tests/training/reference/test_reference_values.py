"""IQL, VDN and QMIX equal a computation from their definitions, in drawn cases."""

import random
from functools import partial
from typing import Any

import pytest
import reference_values as reference
import torch
from drawn_env import (
    DrawnEnv,
    Kind,
    assert_varied,
    combinations,
    draw_kind,
    draw_setup,
    noted_draws,
)
from reference_networks import observe_last_actions, settings_of, weights_of

from marl_collect import Collector
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.value_decomposition import ValueLearner

pytestmark = pytest.mark.processes

CASES = 48
FRAMES = 120
ENVIRONMENTS = 3


def drawn(seed: int) -> tuple[Kind, Setup, dict[str, Any]]:
    """Draw an environment, a setup and settings."""
    pick = random.Random(seed)
    algorithm = pick.choice(["iql", "vdn", "qmix"])
    recurrent = pick.choice([None, "gru"])
    replay = "auto" if recurrent else pick.choice(["auto", "frames", "episodes"])
    groups = {"red": pick.randint(1, 3)}
    turns = algorithm != "iql" and pick.random() < 0.4
    kind = draw_kind(pick, groups, turns=turns)
    setup = draw_setup(pick, algorithm)
    settings = {
        "gamma": pick.choice([1.0, 0.95, 0.6]),
        "reward": pick.choice(["agent", "team"]),
        "reward_scale": pick.choice([1.0, 0.3]),
        "standardise_rewards": pick.random() < 0.4,
        "num_cells": pick.choice([(5,), (7, 4)]),
        "recurrent": recurrent,
        "hidden_size": 6,
        "conv": "2k8s8",
        "value.lr": 1e-3,
        "value.replay": replay,
        "value.double_q": pick.random() < 0.5,
        "bootstrap_limits": pick.random() < 0.6,
        "value.tau": pick.choice([0.1, 1.0]),
        "value.target_interval": pick.choice([1, 2]),
        "value.minibatch_frames": 30,
        "value.minibatch_episodes": 5,
        "value.frames_per_update": FRAMES,  # One step of the optimiser.
        "value.warm_up_frames": 0,
        "value.mixing_cells": 4,
        "value.mixing_gain": 1.0,
        "value.mixing_hyper_cells": pick.choice([0, 6]),
        "value.mixing_norm": pick.random() < 0.5,
        "value.max_grad_norm": pick.choice([0.1, 100.0]),
    }
    settings["last_action"] = random.Random(2000 + seed).random() < 0.4
    if setup.centralised and recurrent is None:
        settings["network"] = pick.choice([None, "attention"])
    return kind, setup, settings


def whole_episodes(batch: Any) -> list[reference.Frames]:
    """Return the episodes that begin and end in a batch from the collector's first."""
    episodes = []
    for row in range(len(batch)):
        first = 0
        for frame in torch.nonzero(batch[row, :]["next", "done"][:, 0])[:, 0].tolist():
            episodes.append((row, first, frame + 1))
            first = frame + 1
    return episodes


close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


class Case:
    """A learner, the weights of its networks and targets, and a batch."""

    def __init__(self, seed: int) -> None:
        kind, setup, changed = drawn(seed)
        factory = partial(DrawnEnv, kind)
        options = TrainingOptions(frames=FRAMES).with_settings(changed)
        made = partial(ValueLearner, factory().description, setup, seed=seed)
        with Collector(
            [factory] * ENVIRONMENTS,
            made(options=options).policy,
            frames_per_batch=FRAMES,
            seed=seed,
        ) as collector:
            self.batch = collector.next().clone()
        self.observed = self.batch
        if options.last_action:
            self.observed = observe_last_actions(self.batch, kind.groups)
        whole = options.value.replay == "episodes" or options.recurrent is not None
        self.sequences = (
            whole_episodes(self.batch)
            if whole
            else [(row, t, t + 1) for row in range(3) for t in range(FRAMES // 3)]
        )
        count = {"value.episodes_per_update": len(self.sequences)}  # One step.
        options = options.with_settings(count)
        learner: Any = made(options=options)
        self.learner, self.value, self.whole = learner, options.value, whole
        self.modules = {"values": learner.values}
        if setup.algorithm == "qmix":
            self.modules["mixer"] = learner.mixer
        self.target = {name: weights_of(m) for name, m in self.modules.items()}
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # Target networks have other weights.
            for weight in learner.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=noise)
        self.online = {name: weights_of(m) for name, m in self.modules.items()}
        self.parameters = [p for m in self.modules.values() for p in m.parameters()]
        self.settings = settings_of(setup, options, options.value, group="red")

    def expected(
        self, sequences: list[reference.Frames]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return the reference's loss, its weights, and their gradients or None."""
        loss = reference.loss(
            self.online, self.target, self.observed, self.settings, sequences
        )
        weights = [w for network in self.online.values() for w in network.values()]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        return loss.detach(), weights, list(gradients)


@pytest.mark.parametrize("seed", range(CASES))
def test_losses_and_gradients_equal_their_definition(seed: int) -> None:
    case = Case(seed)
    case.learner.remember(case.batch)
    drawn_sequences = torch.tensor(
        [(row, first, stop - first) for row, first, stop in case.sequences]
    )
    loss, _ = case.learner.loss(case.learner.replay.take(drawn_sequences))
    loss.backward()
    expected, _, gradients = case.expected(case.sequences)
    close(loss.detach().double(), expected)
    for gradient, parameter in zip(gradients, case.parameters, strict=True):
        nothing = torch.zeros_like(parameter)
        actual = nothing if parameter.grad is None else parameter.grad
        close(actual.double(), nothing.double() if gradient is None else gradient)


@pytest.mark.parametrize("seed", range(CASES))
def test_updates_equal_definitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed)
    taken = noted_draws(case.learner, monkeypatch)
    case.learner.update(case.batch, progress=1.0)
    sequences = [(row, t, t + n) for row, t, n in taken.pop()]
    assert not taken
    value = case.value
    size = value.minibatch_episodes if case.whole else value.minibatch_frames
    assert len(sequences) == size
    assert set(sequences) <= set(case.sequences)
    _, weights, gradients = case.expected(sequences)
    norm = sum(float((g**2).sum()) for g in gradients if g is not None) ** 0.5
    factor = min(1.0, value.max_grad_norm / (norm + 1e-6))
    for weight, gradient, parameter in zip(
        weights, gradients, case.parameters, strict=True
    ):
        actual = parameter.detach().double()
        if gradient is None:
            close(actual, weight.detach())
            continue
        clipped = factor * gradient
        moved = weight.detach() - value.lr * clipped / (clipped.abs() + 1e-8)
        # Adam's first step has one size, also if the gradient is a rounding error.
        sure = clipped.abs() > 1e-4
        close(actual[sure], moved[sure], atol=1e-6)
    tau = value.tau if value.target_interval == 1 else 0.0
    targets = dict(case.learner.untrained["targets"].named_parameters())
    for name, module in case.modules.items():
        for key, parameter in module.named_parameters():
            mixed = (1 - tau) * case.target[name][key] + tau * parameter.double()
            close(targets[f"{name}.{key}"].double(), mixed.detach())


def test_the_cases_have_everything() -> None:
    """Every choice is drawn, so that no comparison above is missing by chance."""
    cases = []
    for seed in range(CASES):
        kind, setup, settings = drawn(seed)
        cases.append(vars(kind) | vars(setup) | {"network": None} | settings)
        cases[-1]["qmix"] = setup.algorithm == "qmix"
    several = {
        "": "turns truncates action_mask picture done_on_any",
        "turns deaths": "returns",
        "network": "share_params agent_ids deaths",
        "last_action": "recurrent network turns",
        "qmix": "picture turns",
    }
    assert_varied(cases, several)
    each = "network last_action recurrent bootstrap_limits standardise_rewards"
    each += " value.double_q value.replay value.tau value.target_interval"
    each += " value.mixing_norm value.mixing_hyper_cells"
    for algorithm in ("iql", "vdn", "qmix"):
        some = [case for case in cases if case["algorithm"] == algorithm]
        assert_varied(some, {"": each})
        assert combinations(some, "bootstrap_limits", "truncates") == 4
        assert combinations(some, "centralised", "share_params") == 4
