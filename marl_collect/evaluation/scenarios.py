"""MeltingPot's protocol: a focal population among a background population.

Source: Leibo et al., "Scalable Evaluation of Multi-Agent Reinforcement Learning with
Melting Pot", ICML 2021, arXiv 2107.06857: the score of a scenario is the mean return
per focal player.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import numpy as np

from marl_collect.core.seeding import Purpose, derive
from marl_collect.evaluation.cross_playing import (
    agents_of,
    check_arguments,
    check_policies,
    everybody,
    members,
    per_capita,
)
from marl_collect.evaluation.evaluator import evaluate
from marl_collect.evaluation.intervals import Interval, bootstrap

_FOCAL, _BACKGROUND = "focal_", "background_"


@final
@dataclass(frozen=True)
class Scenario:
    """An environment, its focal players, and the population of the others.

    MeltingPot's own scenarios have their bots in the environment, so all agents are
    focal: ``Scenario("coins_0", lambda: MeltingpotEnv("coins_0"))``.

    Attributes:
        name: of the scenario.
        create_env_fn: a factory that builds the environment.
        focal: names of the focal agents; None for all.
        background: policies of the other agents: a policy, a mapping, or a
            ``PolicyPool``. In each episode one is sampled for each agent. None:
            random actions, or no other agents.
        reference: scores that are 0 and 1 after normalisation, such as those of random
            actions and of a trained population; None if they are not known.
    """

    name: str
    create_env_fn: Any
    focal: Collection[str] | None = None
    background: Any = None
    reference: tuple[float, float] | None = None


@final
@dataclass(frozen=True)
class ScenarioScore:
    """The result of a scenario.

    Attributes:
        name: of the scenario.
        returns: focal per-capita return of each episode: mean over focal agents of
            their sums of rewards.
        reference: of the scenario.
    """

    name: str
    returns: list[float] = field(repr=False)
    reference: tuple[float, float] | None = None

    @property
    def score(self) -> Interval:
        """Mean focal per-capita return and its 95 % interval."""
        return bootstrap([self.returns], estimate=np.mean)

    @property
    def normalised(self) -> Interval | None:
        """The score on the scale of the reference scores; None if there are none."""
        if self.reference is None:
            return None
        low, high = self.reference
        scaled = (np.array(self.returns) - low) / (high - low)
        return bootstrap([scaled], estimate=np.mean)


def evaluate_scenarios(
    policy: Any,
    scenarios: Sequence[Scenario],
    *,
    episodes: int,
    seed: int = 0,
    **options: Any,
) -> list[ScenarioScore]:
    """Return the focal per-capita return of a population in scenarios.

    Args:
        policy: the focal population: a policy, a mapping of policies, or a
            ``PolicyPool``. In each episode one of them is sampled for each focal agent.
        scenarios: the scenarios.
        episodes: number of episodes of each scenario.
        seed: of the first episode; each episode has the seed after the last one's.
        options: further arguments of ``evaluate``, such as ``num_workers``.

    Raises:
        TypeError: if a policy is not possible, or ``scenarios`` are not scenarios.
        ValueError: if a scenario's agents or reference scores are not possible. All
            scenarios are checked before the first is evaluated.
    """
    scenarios = _listed(scenarios)
    for scenario in scenarios:
        check_arguments(
            "evaluate_scenarios()", scenario.create_env_fn, episodes, seed, options
        )
    focal = {f"{_FOCAL}{name}": member for name, member in members(policy).items()}
    for scenario in scenarios:
        try:
            check_policies(focal | _background(scenario))
        except (TypeError, ValueError) as error:
            error.add_note(f"The policies belong to scenario {scenario.name!r}.")
            raise
    groups = [agents_of(scenario.create_env_fn, options) for scenario in scenarios]
    for scenario, agents in zip(scenarios, groups, strict=True):
        _check(scenario, everybody(agents))
    seeds = range(seed, seed + episodes)
    scores: list[ScenarioScore] = []
    for scenario, agents in zip(scenarios, groups, strict=True):
        try:
            scores.append(_evaluated(scenario, agents, focal, seeds, options))
        except Exception as error:
            error.add_note(f"Raised in scenario {scenario.name!r}.")
            if scores:
                error.add_note("The scores before it:")
            for score in scores:
                error.add_note(f"{score.name}: {score.score}")
            raise
    return scores


def _evaluated(
    scenario: Scenario,
    agents: Mapping[str, list[str]],
    focal: Mapping[str, Any],
    seeds: range,
    options: Mapping[str, Any],
) -> ScenarioScore:
    chosen = frozenset(everybody(agents) if scenario.focal is None else scenario.focal)
    policies = dict(focal)
    if chosen != set(everybody(agents)):
        policies |= _background(scenario)
    evaluation = evaluate(
        None,
        scenario.create_env_fn,
        episodes=len(seeds),
        seeds=seeds,
        policies=policies,
        assign=_Populations(chosen, tuple(policies)),
        **options,
    )
    returns = [per_capita(episode, agents, chosen) for episode in evaluation.episodes]
    return ScenarioScore(scenario.name, returns, scenario.reference)


def _background(scenario: Scenario) -> dict[str, Any]:
    others = members(scenario.background)
    return {f"{_BACKGROUND}{name}": member for name, member in others.items()}


@final
@dataclass(frozen=True)
class _Populations:
    """Samples the policy of each agent from its population."""

    focal: frozenset[str]
    names: tuple[str, ...]

    def __call__(self, seed: int, agents: tuple[str, ...]) -> dict[str, str]:
        """Return each agent's policy."""
        rng = random.Random(derive(seed, Purpose.SEATS))
        by_kind = {
            kind: [name for name in self.names if name.startswith(kind)]
            for kind in (_FOCAL, _BACKGROUND)
        }
        return {
            agent: rng.choice(by_kind[_FOCAL if agent in self.focal else _BACKGROUND])
            for agent in agents
        }


def _listed(scenarios: Any) -> list[Scenario]:
    """Return all scenarios of what may be an iterator.

    Raises:
        TypeError: if they are no scenarios, or there is only one.
    """
    if isinstance(scenarios, Scenario):
        raise TypeError("scenarios must be a list: pass [scenario].")
    listed = list(scenarios)
    for scenario in listed:
        if not isinstance(scenario, Scenario):
            raise TypeError(f"A scenario must be a Scenario, but is {scenario!r:.200}.")
    return listed


def _check(scenario: Scenario, agents: tuple[str, ...]) -> None:
    focal = agents if scenario.focal is None else scenario.focal
    single = isinstance(focal, str)
    if single or not focal or not set(focal) <= set(agents):
        raise ValueError(
            f"The focal agents of scenario {scenario.name!r} must be some of "
            f"{list(agents)}, but are {focal if single else sorted(focal)!r}."
        )
    if scenario.background is not None and set(focal) == set(agents):
        raise ValueError(
            f"All agents of scenario {scenario.name!r} are focal, so nobody plays with "
            "its background: name the focal agents with focal=, or omit background."
        )
    reference = (0, 1) if scenario.reference is None else tuple(scenario.reference)
    numbers = {s for s in reference if isinstance(s, Real) and math.isfinite(s)}
    if len(reference) != 2 or len(numbers) != 2:
        raise ValueError(
            f"The reference scores of scenario {scenario.name!r} must be two different "
            f"finite numbers, but are {reference}."
        )
