"""PPO equals a computation from its definition, in cases drawn at random."""

import math
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference_ppo as reference
import torch
from drawn_cases import ACTOR_CRITIC, central, drawn, whole
from drawn_env import DrawnEnv, assert_varied, combinations
from reference_networks import observe_last_actions, settings_of, weights_of

from marl_collect import Collector
from marl_collect.training.advantages import TRAINED
from marl_collect.training.episode_batches import EpisodeBatches
from marl_collect.training.learner import RunningMoments
from marl_collect.training.options import TrainingOptions
from marl_collect.training.ppo import PPOLearner

CASES = 40
FRAMES = 12
ENVIRONMENTS = 3


LEARNT = (-1.0, 0.5, 2.0)
"""Returns that a critic learnt before, if it learns standardised ones."""


def case(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a learner, a batch from weights that it had before, and its settings.

    The batch comes twice: as it is, and as the reference observes it.
    """
    kind, setup, settings = drawn("ppo", seed)
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
        settings_of(
            setup,
            options,
            ppo,
            groups=kind.groups,
            central=central(setup),
            once=setup.algorithm in ACTOR_CRITIC.values(),
            length=min(ppo.sequence_frames, batch.shape[1]) if recurrent else 1,
            remembers=recurrent and ppo.recurrent_critic,
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
    expected = reference.loss(policy, critic, prepared, [*range(count)], settings)
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
    of_both = [*policy.values(), *critic.values()]
    gradients = torch.autograd.grad(expected, of_both, materialize_grads=True)
    parameters = [*learner.policy.parameters(), *learner.critic.parameters()]
    for gradient, parameter in zip(gradients, parameters, strict=True):
        nothing = torch.zeros_like(parameter)
        actual = nothing if parameter.grad is None else parameter.grad
        close(actual.double(), gradient)
    reference.train(policy, critic, prepared, minibatches, settings, old)
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


VARIED = {
    "": "turns truncates action_mask picture done_on_any several once bootstrap_limits "
    "ppo.critic_num_cells "
    "ppo.recurrent_critic ppo.target_tau ppo.critic_lr ppo.clip_apart ppo.popart "
    "ppo.normalise_advantages ppo.normalise_values",
    "deaths": "returns",
    "picture": "recurrent",
    "turns": "recurrent deaths ppo.n_steps",
    "once": "recurrent",
    "recurrent": "ppo.target_tau",
    "network centralised": "share_params agent_ids several picture deaths",
    "network central": "share_params agent_ids several picture deaths recurrent",
    "ppo.normalise_values": "ppo.clip_value",
    "ppo.normalise_values ppo.target_tau": "ppo.popart",
    "ppo.popart": "several central share_params ppo.recurrent_critic",
    "ppo.popart central": "network",
    "whole": "truncates turns bootstrap_limits standardise_rewards recurrent",
    "whole recurrent": "ppo.recurrent_critic",
    "last_action": "several central recurrent network turns continuous",
}
"""What must have several values, by what the cases have in which it must."""


def test_the_cases_have_everything() -> None:
    """Every choice is drawn, so that no comparison above is missing by chance."""
    cases = []
    for seed in range(CASES):
        kind, setup, settings = drawn("ppo", seed)
        facts = {"several": len(kind.groups) > 1, "whole": whole(seed)}
        facts |= {"central": central(setup), "once": "a2c" in setup.algorithm}
        cases.append(vars(kind) | vars(setup) | settings | facts)
    assert_varied(cases, VARIED)
    assert combinations(cases, "algorithm") == 4
    assert combinations(cases, "central", "centralised", "share_params") == 8
    assert combinations(cases, "standardise_rewards", "reward") == 4
    for name, count in (("n_steps", 4), ("huber_delta", 3), ("clip_value", 3)):
        assert combinations(cases, f"ppo.{name}") == count
