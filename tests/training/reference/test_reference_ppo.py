"""PPO equals a computation from its definition, in cases drawn at random."""

import math
import random
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference_ppo as reference
import torch
from drawn_env import DrawnEnv, Kind
from reference_networks import observe_last_actions, weights_of

from marl_collect import Collector
from marl_collect.training.advantages import TRAINED
from marl_collect.training.episode_batches import EpisodeBatches
from marl_collect.training.learner import RunningMoments
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner

CASES = 40
FRAMES = 12
ENVIRONMENTS = 3


def drawn(seed: int) -> tuple[Kind, Setup, dict[str, Any]]:
    """Draw an environment, a setup and settings."""
    pick = random.Random(seed)
    several = pick.random() < 0.5
    groups = {"red": pick.randint(1, 3)} | (
        {"blue": pick.randint(1, 2)} if several else {}
    )
    continuous = tuple(name for name in groups if pick.random() < 0.3)
    kind = Kind(
        groups=groups,
        continuous=continuous,
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
        pick.choice(["ippo", "mappo"]),
        centralised=pick.random() < 0.4,
        share_params=pick.random() < 0.5,
        agent_ids=pick.random() < 0.4,
    )
    settings = {
        "gamma": pick.choice([1.0, 0.95, 0.6]),
        "reward": pick.choice(["agent", "team"]),
        "reward_scale": pick.choice([1.0, 0.3]),
        "standardise_rewards": seed % 3 == 0,
        "recurrent": pick.choice([None, None, "gru"]),
        "hidden_size": 6,
        "num_cells": pick.choice([(5,), (7, 4)]),
        "conv": "2k8s8",
        "ppo.lmbda": pick.choice([0.0, 0.7, 1.0]),
        "ppo.clip_epsilon": pick.choice([0.05, 0.2]),
        # The entropy of continuous actions is an estimate from random numbers.
        "ppo.entropy_coeff": 0.0 if continuous else pick.choice([0.0, 0.1]),
        "ppo.critic_coeff": pick.choice([0.5, 1.0]),
        "ppo.max_grad_norm": pick.choice([0.1, 100.0]),
        "ppo.sequence_frames": pick.choice([4, 5, 12]),
        "ppo.minibatch_frames": pick.choice([12, 1000]),
        "ppo.epochs": 2,
        "ppo.lr": 1e-3,
    }
    pick = random.Random(1000 + seed)
    memory = settings["recurrent"] is not None and pick.random() < 0.5
    settings |= {
        "ppo.recurrent_critic": memory,
        "ppo.target_tau": None if memory else pick.choice([None, 0.3]),
        "ppo.critic_lr": pick.choice([None, 3e-3]),
        "ppo.clip_apart": pick.random() < 0.5,
        "ppo.n_steps": pick.choice([None, None, 1, 2, 5]),
        "ppo.normalise_advantages": pick.random() < 0.6,
        "bootstrap_limits": pick.random() < 0.6,
        "ppo.huber_delta": pick.choice([None, 0.2, 1.0]),
        "ppo.clip_value": pick.choice([None, 0.002, 0.02]),
        "ppo.normalise_values": pick.random() < 0.5,
    }
    if pick.random() < 0.4:
        setup = replace(setup, algorithm=ACTOR_CRITIC[setup.algorithm])
    remembers = settings["recurrent"] is not None and setup.centralised
    remembers |= memory and central(setup)
    settings["ppo.popart"] = settings["ppo.normalise_values"] and pick.random() < 0.6
    settings["network"] = None if remembers or pick.random() < 0.3 else "attention"
    settings["last_action"] = random.Random(2000 + seed).random() < 0.4
    return kind, setup, settings


def whole(seed: int) -> bool:
    """Return whether the batch of a case has whole episodes, with padding."""
    return random.Random(2000 + seed).random() < 0.4


def central(setup: Setup) -> bool:
    """Return whether the critic sees all agents."""
    return setup.algorithm in ("mappo", "maa2c")


ACTOR_CRITIC = {"ippo": "ia2c", "mappo": "maa2c"}
LEARNT = (-1.0, 0.5, 2.0)
"""Returns that a critic learnt before, if it learns standardised ones."""


def case(seed: int) -> tuple[Any, Any, Any, reference.Settings]:
    """Return a learner, a batch from weights that it had before, and its settings.

    The batch comes twice: as it is, and as the reference observes it.
    """
    kind, setup, settings = drawn(seed)
    factory = partial(DrawnEnv, kind)
    options = TrainingOptions(
        frames_per_batch=FRAMES * ENVIRONMENTS, workers=1, envs_per_worker=ENVIRONMENTS
    ).with_settings(settings)
    learner: Any = PPOLearner(factory().description, setup, options, seed=seed)
    with Collector(
        [factory] * ENVIRONMENTS,
        learner.policy,
        frames_per_batch=FRAMES * ENVIRONMENTS,
        seed=seed,
    ) as collector:
        first = collector.next().clone()
        if whole(seed):
            batch: Any = EpisodeBatches(collector, 2 * ENVIRONMENTS).next().clone()
        else:
            batch = collector.next().clone()  # Begins within episodes.
    observed = batch
    if options.last_action and whole(seed):
        observed = observe_last_actions(batch, kind.groups)
    elif options.last_action:
        observed = observe_last_actions(torch.cat([first, batch], 1), kind.groups)
        observed = observed[:, FRAMES:]
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # Ratios of probabilities become others than 1.
        for weight in learner.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=noise)
    learn_before(learner)
    ppo = options.ppo
    recurrent = options.recurrent is not None
    return (
        learner,
        batch,
        observed,
        reference.Settings(
            groups=kind.groups,
            central=central(setup),
            once=setup.algorithm in ACTOR_CRITIC.values(),
            centralised=setup.centralised,
            ids=setup.agent_ids,
            recurrent=recurrent,
            team=options.reward == "team",
            gamma=options.gamma,
            lmbda=options.ppo.lmbda,
            scale=options.reward_scale,
            standardised=options.standardise_rewards,
            clip=options.ppo.clip_epsilon,
            entropy=options.ppo.entropy_coeff,
            critic=options.ppo.critic_coeff,
            length=min(ppo.sequence_frames, batch.shape[1]) if recurrent else 1,
            remembers=recurrent and ppo.recurrent_critic,
            attends=options.network == "attention",
            n_steps=ppo.n_steps,
            normal=ppo.normalise_advantages,
            bootstraps=options.bootstrap_limits,
            huber=ppo.huber_delta,
            clip_value=ppo.clip_value,
            tau=ppo.target_tau,
            apart=ppo.clip_apart,
            rates=(ppo.lr, ppo.critic_lr or ppo.lr),
            popart=ppo.popart,
            learnt=LEARNT if ppo.normalise_values else None,
        ),
    )


def learn_before(learner: Any) -> None:
    """Forget what the critic learnt and its state, except for ``LEARNT``."""
    learner._states = {}
    for name in learner.description.groups if learner.ppo.normalise_values else ():
        learner._moments["return", name] = RunningMoments()
        learner._moments["return", name].add(torch.tensor(LEARNT))


@pytest.mark.parametrize("seed", range(CASES))
def test_ppo_equals_its_definition(seed: int) -> None:
    learner, batch, observed, settings = case(seed)
    policy, critic = weights_of(learner.policy), weights_of(learner.critic)
    old = weights_of(learner.target or learner.critic)  # Of the target critic.
    at_first = deepcopy(learner.state_dict()["networks"])
    prepared = reference.prepare(critic, observed, settings, old)
    before = batch.clone()
    learner_data = learner.prepare(batch)
    assert (batch == before).all()  # The collector's memory is not modified.
    shape = (-1, settings.length)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)
    for group in settings.groups:
        advantage = prepared.advantage[group]
        trained = ~advantage.isnan()
        actual = learner_data.reshape(*shape)[group]
        assert torch.equal(actual[TRAINED], trained)
        for key, expected in (
            ("advantage", advantage),
            ("value_target", prepared.target[group]),
        ):
            close(actual[key][..., 0][trained].double(), expected[trained])

    count = len(prepared.batch)
    everything = range(count)
    expected = reference.loss(policy, critic, prepared, list(everything), settings)
    loss, _ = learner.loss(learner_data)
    close(loss.detach().double(), expected.detach())

    size = max(1, learner.ppo.minibatch_frames // settings.length)
    order = torch.Generator().manual_seed(learner.generator.initial_seed())
    once = settings.once
    size = count if once else size
    minibatches = [
        torch.from_numpy(rows)
        for _ in range(1 if once else learner.ppo.epochs)
        for rows in np.array_split(
            torch.randperm(count, generator=order).numpy(), math.ceil(count / size)
        )
    ]
    loss.backward()
    networks = {"policy": policy, "critic": critic}
    if learner.target is not None:
        networks["target_critic"] = old
    gradients = torch.autograd.grad(
        expected, [*policy.values(), *critic.values()], allow_unused=True
    )
    parameters = [*learner.policy.parameters(), *learner.critic.parameters()]
    for gradient, parameter in zip(gradients, parameters, strict=True):
        nothing = torch.zeros_like(parameter)
        actual_gradient = nothing if parameter.grad is None else parameter.grad
        close(
            actual_gradient.double(), nothing.double() if gradient is None else gradient
        )

    reference.train(
        policy,
        critic,
        prepared,
        minibatches,
        settings,
        max_norm=learner.ppo.max_grad_norm,
        target_critic=old,
    )
    learn_before(learner)
    for name, module in (learner.networks | learner.untrained).items():
        module.load_state_dict(at_first[name])
    # The same rewards a second time have the moments that they had alone.
    learner.update(batch, progress=0.0)
    for name, weights in networks.items():
        module = (learner.networks | learner.untrained)[name]
        for key, parameter in module.named_parameters():
            # Adam divides by the size of a gradient, also by that of rounding errors.
            torch.testing.assert_close(
                parameter.double(), weights[key], rtol=1e-4, atol=2e-5, msg=key
            )


def test_the_cases_have_everything() -> None:
    """Every choice is drawn, so that no comparison above is missing by chance."""
    cases = [drawn(seed) for seed in range(CASES)]
    for name in ("turns", "truncates", "action_mask", "picture", "done_on_any"):
        assert {getattr(kind, name) for kind, _, _ in cases} == {True, False}
    assert any(kind.deaths and kind.returns for kind, _, _ in cases)
    assert any(kind.picture and s["recurrent"] for kind, _, s in cases)
    assert any(kind.turns and s["recurrent"] for kind, _, s in cases)
    assert any(kind.turns and kind.deaths for kind, _, _ in cases)
    setups = {
        (a.algorithm.replace("a2c", "ppo"), a.centralised, a.share_params)
        for _, a, _ in cases
    }
    assert len(setups) == 8
    memory = {(a.algorithm, s["recurrent"]) for _, a, s in cases}
    assert {name for name, _ in memory} == {*ACTOR_CRITIC, *ACTOR_CRITIC.values()}
    assert {kind for name, kind in memory if "a2c" in name} == {None, "gru"}
    assert {len(kind.groups) for kind, _, _ in cases} == {1, 2}
    assert len({(s["standardise_rewards"], s["reward"]) for _, _, s in cases}) == 4
    assert {s["bootstrap_limits"] for _, _, s in cases} == {True, False}
    attention = [(k, a, s) for k, a, s in cases if s["network"] is not None]
    policies = [(k, a) for k, a, _ in attention if a.centralised]
    critics = [(k, a) for k, a, _ in attention if central(a)]
    for seen in (policies, critics):
        assert {a.share_params for _, a in seen} == {True, False}
        assert {a.agent_ids for _, a in seen} == {True, False}
        assert {len(kind.groups) for kind, _ in seen} == {1, 2}
        assert any(kind.picture for kind, _ in seen)
        assert any(kind.deaths for kind, _ in seen)
    assert any(central(a) and s["recurrent"] for _, a, s in attention)
    for name, count in (
        ("recurrent_critic", 2),
        ("target_tau", 2),
        ("critic_lr", 2),
        ("clip_apart", 2),
        ("n_steps", 4),
        ("normalise_advantages", 2),
        ("huber_delta", 3),
        ("clip_value", 3),
        ("normalise_values", 2),
        ("popart", 2),
    ):
        assert len({s[f"ppo.{name}"] for _, _, s in cases}) == count, name
    assert any(s["recurrent"] and s["ppo.target_tau"] for _, _, s in cases)
    assert any(s["ppo.n_steps"] and kind.turns for kind, _, s in cases)
    assert any(s["ppo.normalise_values"] and s["ppo.clip_value"] for _, _, s in cases)
    rescaled = [(kind, a, s) for kind, a, s in cases if s["ppo.popart"]]
    assert {len(kind.groups) for kind, _, _ in rescaled} == {1, 2}
    assert {central(a) for _, a, _ in rescaled} == {True, False}
    assert {a.share_params for _, a, _ in rescaled} == {True, False}
    assert {s["ppo.recurrent_critic"] for _, _, s in rescaled} == {True, False}
    targets = {
        s["ppo.popart"]
        for _, _, s in cases
        if s["ppo.target_tau"] and s["ppo.normalise_values"]
    }
    assert targets == {True, False}
    assert any(s["network"] and central(a) for _, a, s in rescaled)


def test_the_cases_of_whole_episodes_have_everything() -> None:
    of_episodes = [drawn(seed) for seed in range(CASES) if whole(seed)]
    assert {kind.truncates for kind, _, _ in of_episodes} == {True, False}
    assert {kind.turns for kind, _, _ in of_episodes} == {True, False}
    assert {s["bootstrap_limits"] for _, _, s in of_episodes} == {True, False}
    assert {s["standardise_rewards"] for _, _, s in of_episodes} == {True, False}
    memory_of_critics = {
        (s["recurrent"], s["ppo.recurrent_critic"]) for _, _, s in of_episodes
    }
    assert memory_of_critics >= {("gru", True), ("gru", False), (None, False)}


def test_last_actions_are_read_in_all_kinds_of_cases() -> None:
    cases = [drawn(seed) for seed in range(CASES)]
    remembered = [(kind, a, s) for kind, a, s in cases if s["last_action"]]
    assert {len(kind.groups) for kind, _, _ in remembered} == {1, 2}
    assert {central(a) for _, a, _ in remembered} == {True, False}
    assert {s["recurrent"] for _, _, s in remembered} == {None, "gru"}
    assert {s["network"] for _, _, s in remembered} == {None, "attention"}
    assert any(kind.turns for kind, _, _ in remembered)
    assert any(kind.continuous for kind, _, _ in remembered)
