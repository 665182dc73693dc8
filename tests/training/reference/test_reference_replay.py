"""Learners with a replay buffer equal computations from their definitions."""

from functools import partial
from typing import Any

import pytest
import reference_replay as reference
import torch
from drawn_cases import drawn
from drawn_env import DrawnEnv, assert_varied, combinations, noted_draws
from reference_networks import observe_last_actions, settings_of, weights_of
from reference_replay import Frames

from marl_collect import Collector
from marl_collect.training.learner import learner_of
from marl_collect.training.options import TrainingOptions

pytestmark = pytest.mark.processes

FRAMES = 120
ENVIRONMENTS = 3
CASES = [("values", seed) for seed in range(48)] + [("maddpg", k) for k in range(24)]
"""IQL, VDN and QMIX; MADDPG and IDDPG."""


def whole_episodes(batch: Any) -> list[Frames]:
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

    def __init__(self, family: str, seed: int) -> None:
        kind, setup, changed = drawn(family, seed)
        factory = partial(DrawnEnv, kind)
        # One step of the optimiser.
        changed |= {"value.frames_per_update": FRAMES}
        options = TrainingOptions(frames=FRAMES).with_settings(changed)
        make: Any = partial(
            learner_of(setup.algorithm), factory().description, setup, seed=seed
        )
        with Collector(
            [factory] * ENVIRONMENTS,
            make(options=options).policy,
            frames_per_batch=FRAMES,
            seed=seed,
        ) as collector:
            self.batch: Any = collector.next().clone()
        self.observed = self.batch
        if options.last_action:
            self.observed = observe_last_actions(self.batch, kind.groups)
        self.whole = options.value.replay == "episodes" or options.recurrent is not None
        per_row = range(FRAMES // ENVIRONMENTS)
        frames = [(row, t, t + 1) for row in range(ENVIRONMENTS) for t in per_row]
        self.sequences = whole_episodes(self.batch) if self.whole else frames
        count = {"value.episodes_per_update": len(self.sequences)}  # One step.
        options = options.with_settings(count)
        self.learner: Any = make(options=options)
        self.value = options.value
        self.is_maddpg = family == "maddpg"
        self.modules: dict[str, Any] = self.learner.networks
        if not self.is_maddpg:
            self.modules = {"values": self.learner.values}
            if setup.algorithm == "qmix":
                self.modules["mixer"] = self.learner.mixer
        self.target = {name: weights_of(m) for name, m in self.modules.items()}
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # Target networks have other weights.
            for weight in self.learner.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=noise)
        self.online = {name: weights_of(m) for name, m in self.modules.items()}
        groups: dict[str, Any] = {"group": "red"}
        if self.is_maddpg:
            groups = {"groups": kind.groups, "remembers": False}
            groups["central"] = setup.algorithm == "maddpg"
        self.settings = settings_of(setup, options, options.value, **groups)

    def losses(self, sequences: list[Frames]) -> list[tuple[list[str], Any]]:
        """Return the reference's losses, each with the networks that it trains."""
        arguments = self.online, self.target, self.observed, self.settings
        if self.is_maddpg:
            frames = [(row, t) for row, t, _ in sequences]
            critic, policy = reference.losses(*arguments, frames)
            return [(["critic"], critic), (["policy"], policy)]
        return [([*self.online], reference.loss(*arguments, sequences))]

    def gradients(self, names: list[str], loss: Any) -> dict[tuple[str, str], Any]:
        """Return the gradients of networks' weights, or None, by network and name."""
        keys = [(name, key) for name in names for key in self.online[name]]
        weights = [self.online[name][key] for name, key in keys]
        slopes = torch.autograd.grad(loss, weights, allow_unused=True)
        return dict(zip(keys, slopes, strict=True))

    def parameter(self, name: str, key: str) -> Any:
        return self.modules[name].get_parameter(key)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_losses_and_gradients_equal_their_definition(family: str, seed: int) -> None:
    case = Case(family, seed)
    case.learner.remember(case.batch)
    draws = [(row, first, stop - first) for row, first, stop in case.sequences]
    loss, logged = case.learner.loss(case.learner.replay.take(torch.tensor(draws)))
    loss.backward()
    logs = [loss]
    if case.is_maddpg:
        logs = [logged["loss_critic"], logged["loss_objective"]]
    for actual_loss, (names, expected) in zip(
        logs, case.losses(case.sequences), strict=True
    ):
        close(actual_loss.detach().double(), expected.detach())
        for (name, key), slope in case.gradients(names, expected).items():
            parameter = case.parameter(name, key)
            nothing = torch.zeros_like(parameter)
            actual = nothing if parameter.grad is None else parameter.grad
            close(actual.double(), nothing.double() if slope is None else slope)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_updates_equal_definitions(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(family, seed)
    taken = noted_draws(case.learner, monkeypatch)
    case.learner.update(case.batch, progress=1.0)
    sequences = [(row, t, t + n) for row, t, n in taken.pop()]
    assert not taken
    value = case.value
    size = value.minibatch_episodes if case.whole else value.minibatch_frames
    assert len(sequences) == size
    assert set(sequences) <= set(case.sequences)
    for names, loss in case.losses(sequences):
        gradients = case.gradients(names, loss)
        squares = [float((g**2).sum()) for g in gradients.values() if g is not None]
        factor = min(1.0, value.max_grad_norm / (sum(squares) ** 0.5 + 1e-6))
        for (name, key), gradient in gradients.items():
            weight = case.online[name][key].detach()
            actual = case.parameter(name, key).detach().double()
            if gradient is None:
                close(actual, weight)
                continue
            rate = (name == "policy" and value.policy_lr) or value.lr
            clipped = factor * gradient
            moved = weight - rate * clipped / (clipped.abs() + 1e-8)
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
    cases: dict[str, list[dict[str, Any]]] = {"values": [], "maddpg": []}
    for family, seed in CASES:
        kind, setup, settings = drawn(family, seed)
        facts = vars(kind) | vars(setup) | {"network": None} | settings
        facts |= {"qmix": setup.algorithm == "qmix", "several": len(kind.groups) > 1}
        cases[family].append(facts)
    several = {
        "": "turns truncates action_mask picture done_on_any",
        "turns deaths": "returns",
        "network": "share_params agent_ids deaths",
        "last_action": "recurrent network turns",
        "qmix": "picture turns",
    }
    assert_varied(cases["values"], several)
    each = "network last_action recurrent bootstrap_limits standardise_rewards"
    each += " value.double_q value.replay value.tau value.target_interval"
    each += " value.mixing_norm value.mixing_hyper_cells"
    for algorithm in ("iql", "vdn", "qmix"):
        some = [case for case in cases["values"] if case["algorithm"] == algorithm]
        assert_varied(some, {"": each})
        assert combinations(some, "bootstrap_limits", "truncates") == 4
        assert combinations(some, "centralised", "share_params") == 4
    every = "several truncates deaths share_params reward bootstrap_limits"
    for algorithm in ("maddpg", "iddpg"):
        some = [case for case in cases["maddpg"] if case["algorithm"] == algorithm]
        assert_varied(some, {"": f"{every} standardise_rewards"})
    assert_varied(cases["maddpg"], {"": "network", "network": "agent_ids"})
    assert any(c["picture"] and not c["network"] for c in cases["maddpg"])
