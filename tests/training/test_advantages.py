"""Advantages in tasks whose values are known in closed form: turns, deaths, limits."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv
from tensordict import TensorDict

from marl_collect import Collector, EnvDescription, GroupDescription
from marl_collect.envs import PettingZooWrapper
from marl_collect.training.advantages import TRAINED, write_advantages
from marl_collect.training.learner import team_reward
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.value_decomposition import ValueLearner

GAMMA = 0.99
LENGTH = 20
LAMBDAS = (0.0, 0.95, 1.0)


def shown(step: int) -> np.ndarray:
    """Return the one-hot encoding of a step, with which a table can be learned."""
    return np.eye(LENGTH + 1, dtype=np.float32)[step]


class Alternating(AECEnv):
    """Two agents act in turn: 1 for acting, and ``waiting`` for waiting."""

    metadata = {"name": "alternating"}

    def __init__(self, *, waiting: float = 0.0, truncates: bool = False) -> None:
        self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys("ab", spaces.Box(0, 1, (LENGTH + 1,)))
        self.action_spaces = dict.fromkeys("ab", spaces.Discrete(2))
        self.waiting, self.truncates = waiting, truncates

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.steps = 0
        self.agent_selection = "a"
        self.rewards = dict.fromkeys("ab", 0.0)
        self._cumulative_rewards = dict.fromkeys("ab", 0.0)
        self.terminations = dict.fromkeys("ab", False)
        self.truncations = dict.fromkeys("ab", False)
        self.infos: dict[str, dict[str, Any]] = {"a": {}, "b": {}}

    def observe(self, agent: str) -> Any:
        return shown(self.steps)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        actor = self.agent_selection
        other = "b" if actor == "a" else "a"
        self.steps += 1
        self.rewards = {actor: 1.0, other: self.waiting}
        if self.steps == LENGTH:
            flags = self.truncations if self.truncates else self.terminations
            flags.update(a=True, b=True)
        self.agent_selection = other


class OneListed(ParallelEnv):
    """The same task, parallel: ``agents`` has only the one that acts next."""

    metadata = {"name": "one_listed"}
    possible_agents = ["a", "b"]

    def __init__(self, *, waiting: float = 0.0) -> None:
        self.waiting = waiting

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (LENGTH + 1,))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = ["a"], 0
        return {"a": shown(0)}, {"a": {}}

    def step(self, actions: Any) -> Any:
        (actor,) = actions
        assert [actor] == self.agents
        other = "b" if actor == "a" else "a"
        self.steps += 1
        over = self.steps == LENGTH
        named = ["a", "b"] if over else [other]
        self.agents = [] if over else named
        return (
            dict.fromkeys(named, shown(self.steps)),
            {actor: 1.0, other: self.waiting},
            dict.fromkeys(named, over),
            dict.fromkeys(named, False),
            {agent: {} for agent in named},
        )


class Deaths(ParallelEnv):
    """Three agents get 1 per frame while they live; the last one dies after frame 3."""

    metadata = {"name": "deaths"}

    def __init__(self) -> None:
        self.possible_agents = ["a", "b", "c"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (LENGTH + 1,))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = self.possible_agents[:], 0
        return dict.fromkeys(self.agents, shown(0)), {a: {} for a in self.agents}

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        agents, self.steps = self.agents, self.steps + 1
        over = self.steps == LENGTH
        dead = {a: over or (a == "c" and self.steps == 4) for a in agents}
        self.agents = [a for a in agents if not dead[a]]
        return (
            dict.fromkeys(agents, shown(self.steps)),
            dict.fromkeys(agents, 1.0),
            dead,
            dict.fromkeys(agents, False),
            {a: {} for a in agents},
        )


def alternating(**kwargs: Any) -> Any:
    return PettingZooWrapper(Alternating(**kwargs), group_map={"all": ["a", "b"]})


def one_listed(**kwargs: Any) -> Any:
    return PettingZooWrapper(
        OneListed(**kwargs), group_map={"all": ["a", "b"]}, absent="waiting"
    )


def deaths() -> Any:
    return PettingZooWrapper(
        Deaths(), done_on_any=False, group_map={"all": ["a", "b", "c"]}
    )


def geometric(first: float, n: int, ratio: float = GAMMA) -> float:
    """Return ``first * (1 + ratio + ... + ratio ** (n - 1))``."""
    return first * (1 - ratio**n) / (1 - ratio)


def value_in_turn(step: int, agent: int, *, team: bool, waiting: float) -> float:
    """Return the value of acting in ``step``."""
    assert agent == step % 2
    remaining = LENGTH - step
    if team:
        return geometric((1 + waiting) / 2, remaining)
    mine, others = -(-remaining // 2), remaining // 2
    return geometric(1.0, mine, GAMMA**2) + geometric(waiting * GAMMA, others, GAMMA**2)


def value_with_deaths(step: int, agent: int, *, team: bool) -> float:
    remaining = LENGTH - step
    shared = max(0, 4 - step)
    if not team:
        return geometric(1.0, shared if agent == 2 else remaining)
    return geometric(1.0, shared) + GAMMA**shared * geometric(2 / 3, remaining - shared)


class Table(nn.Module):
    """A critic with a number per step and agent; never trained ones are garbage."""

    def __init__(self, group: str, n_agents: int) -> None:
        super().__init__()
        self.group = group
        self.values = torch.full((LENGTH + 1, n_agents), 1e4, dtype=torch.float64)

    def forward(self, data: Any) -> Any:
        steps = data[self.group, "observation"].argmax(-1)
        agents = torch.arange(self.values.shape[1]).expand_as(steps)
        data[self.group, "state_value"] = self.values[steps, agents].unsqueeze(-1)
        return data


def description(factory: Any) -> Any:
    env = factory()
    env.close()
    return env.description


def learner_of(factory: Any, name: str, lmbda: float, **settings: Any) -> Any:
    settings = {"gamma": GAMMA, "ppo.lmbda": lmbda, "num_cells": (8,)} | settings
    options = TrainingOptions().with_settings(settings)
    return PPOLearner(description(factory), Setup.parse(name), options, seed=0)


def batch_of(factory: Any, learner: Any, frames: int = 70) -> Any:
    with Collector(
        factory, learner.policy, frames_per_batch=frames, total_frames=frames, seed=1
    ) as collector:
        return collector.next().clone()


CASES = {
    "turns": (alternating, value_in_turn, {"waiting": 0.0}),
    "turns, paid for waiting": (
        partial(alternating, waiting=0.5),
        value_in_turn,
        {"waiting": 0.5},
    ),
    "one listed": (
        partial(one_listed, waiting=0.5),
        value_in_turn,
        {"waiting": 0.5},
    ),
    "deaths": (deaths, value_with_deaths, {}),
}


@pytest.mark.parametrize("reward", ["agent", "team"])
@pytest.mark.parametrize("lmbda", LAMBDAS)
@pytest.mark.parametrize("case", CASES)
def test_values_learned_by_a_table_are_those_of_the_task(
    case: Any, lmbda: float, reward: str
) -> None:
    """Rows that are never trained keep garbage, which must not reach any target."""
    factory, value_of, kwargs = CASES[case]
    learner = learner_of(factory, "mappo-local-shared", lmbda, reward=reward)
    batch = batch_of(factory, learner)
    (name,) = learner.description.groups
    steps = batch[name, "observation"].argmax(-1).flatten(0, 1)
    acts = batch[name, "mask"].flatten(0, 1)
    table = Table(name, learner.description.groups[name].n_agents)
    learner.critic = table
    for _ in range(2 * LENGTH + 2):
        flat = learner.prepare(batch)
        target, trained = flat[name, "value_target"].squeeze(-1), flat[name, TRAINED]
        assert not (trained & ~acts).any()
        frames, agents = trained.nonzero(as_tuple=True)
        table.values[steps[frames, agents], agents] = target[trained].double()
    # At most the last decision of each agent has no known outcome.
    assert int((acts & ~trained).sum()) <= 1
    for frame, agent in acts.nonzero().tolist():
        step = int(steps[frame, agent])
        expected = value_of(step, agent, team=reward == "team", **kwargs)
        assert float(table.values[step, agent]) == pytest.approx(expected, rel=1e-5)


def test_the_closed_forms_give_the_numbers_known_by_hand() -> None:
    assert value_in_turn(0, 0, team=False, waiting=0.0) == pytest.approx(9.15, abs=5e-3)
    assert value_with_deaths(19, 0, team=True) == pytest.approx(2 / 3)
    assert value_with_deaths(3, 2, team=False) == 1.0


@pytest.mark.parametrize("reward", ["agent", "team"])
@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_a_decision_that_a_limit_cuts_is_left_out(lmbda: float, reward: str) -> None:
    """It is not known who would have acted next; the one before it has a target."""
    factory = partial(alternating, truncates=True)
    learner = learner_of(factory, "ippo-local-own", lmbda, reward=reward)
    table = Table("player", 2)
    (name,) = learner.description.groups
    table.group, learner.critic = name, table
    table.values[:] = torch.arange(LENGTH + 1.0).unsqueeze(-1)
    flat = learner.prepare(batch_of(factory, learner, LENGTH))
    trained = flat[name, TRAINED]
    # All rows of both agents are decisions for the team: only its last has no outcome.
    left_out = [LENGTH - 1] if reward == "team" else [LENGTH - 2, LENGTH - 1]
    for step in range(LENGTH):
        assert bool(trained[step, step % 2]) is (step not in left_out)
    target = float(flat[name, "value_target"][LENGTH - 4, 0])
    expected = {
        "agent": 1 + GAMMA**2 * (LENGTH - 2),
        "team": 0.5 + GAMMA * (LENGTH - 3)
        if lmbda == 0
        else geometric(0.5, 3) + GAMMA**3 * (LENGTH - 1),
    }
    assert target == pytest.approx(expected[reward], rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(("bootstraps", "targets"), [(True, [5, 2]), (False, [2, 2])])
def test_an_agent_stopped_alone_has_its_own_value_only_with_bootstrapping(
    bootstraps: bool, targets: list[float]
) -> None:
    space = spaces.Box(0, 1, (1,))
    group = GroupDescription(("a", "b"), space, spaces.Discrete(2))
    settings = {"ppo.bootstrap_limits": bootstraps, "gamma": 0.5, "reward": "team"}
    no, stopped = torch.zeros(1, 1, 2, 1).bool(), torch.tensor([[[[True], [False]]]])
    values = torch.tensor([[[[10.0], [4.0]]]])
    flags = {"done": stopped, "terminated": no, "truncated": stopped}
    of_team = TensorDict({"state_value": values, "done": no}, [1, 1, 2])
    after = flags | {"reward": torch.zeros_like(values), "state_value": values}
    root = {"done": no[:, :, 0], "terminated": no[:, :, 0]}
    data = TensorDict(
        {"team": of_team, "next": root | {"team": TensorDict(after, [1, 1, 2])}},
        [1, 1],
    )
    write_advantages(
        data,
        data,
        EnvDescription("stopped", {"team": group}),
        TrainingOptions().with_settings(settings),
    )
    assert data["team", "value_target"].flatten().tolist() == targets
    assert data["team", TRAINED].all()


def test_value_decomposition_leaves_out_frames_without_a_next_value() -> None:
    factory = partial(alternating, truncates=True)
    learner = ValueLearner(
        description(factory), Setup.parse("vdn-local-own"), TrainingOptions(), seed=0
    )
    batch = batch_of(factory, learner, 2 * LENGTH)
    assert (team_reward(batch, learner.description) == 1).all()
    learner.remember(batch)
    frames = torch.arange(2 * LENGTH)
    draws = torch.stack([0 * frames, frames, torch.ones_like(frames)], -1)
    data = learner.replay.take(draws)
    counts = data["counts"].squeeze() == 1
    assert torch.equal(counts, ~batch["next", "done"].squeeze())
    assert (data["follows"].sum(-1).squeeze()[counts] == 1).all()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ippo-local-own", "iql-local-own", "vdn-local-own"])
def test_a_reward_that_is_not_finite_is_named(name: str) -> None:
    kind = PPOLearner if name.startswith("ippo") else ValueLearner
    learner = kind(description(deaths), Setup.parse(name), TrainingOptions(), seed=0)
    batch = batch_of(deaths, learner, 10)
    (group,) = learner.description.groups
    batch["next", group, "reward"][0, 3, 1] = float("nan")
    with pytest.raises(ValueError, match=f"A reward of group '{group}' is NaN"):
        learner.update(batch, progress=0.0)


def test_a_batch_without_a_known_outcome_says_what_to_change() -> None:
    learner = learner_of(alternating, "ippo-local-shared", 0.95)
    batch = batch_of(alternating, learner, 1)
    for use in (learner.prepare, partial(learner.update, progress=0.0)):
        with pytest.raises(ValueError, match="with 1 frames per environment, no agent"):
            use(batch)
