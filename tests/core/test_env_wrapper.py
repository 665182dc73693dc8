"""Changes to an environment: what wrappers add, and that all else stays as it is."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.worlds import CountingWorlds
from support.zoo import (
    COMINGS_AND_GOINGS,
    SHORT_TURNS,
    Script,
    ScriptedEnv,
    ScriptedTurns,
)
from workloads.counting import CountingEnv

from marl_collect import Collector, EnvWrapper, SerialEnv, check_env
from marl_collect.core.description import allocate
from marl_collect.envs import PettingZooWrapper


class Plain(EnvWrapper):
    """Changes nothing."""


class OthersRewards(EnvWrapper):
    """Agents also observe the last rewards of their whole group."""

    def __init__(self, env: Any) -> None:
        groups = env.description.groups.items()
        rewards = {
            name: {"rewards": spaces.Box(-np.inf, np.inf, (g.n_agents,), np.float32)}
            for name, g in groups
        }
        super().__init__(env, observe=rewards)
        self.groups = list(rewards)

    def after_reset(self, begun: Any, seed: Any) -> None:
        for name in self.groups:
            self.row[name, "observation", "rewards"][begun] = 0

    def after_step(self) -> None:
        for name in self.groups:
            rewards = self.row[name, "reward"][..., 0]
            self.row[name, "observation", "rewards"][...] = rewards[..., None, :]


class Bonus(EnvWrapper):
    """Adds 1 to every reward, also of agents that are done."""

    def after_step(self) -> None:
        for name in self.description.groups:
            self.row[name, "reward"][...] += 1


class Reputation(EnvWrapper):
    """A running mean of actions that begins with noise of the seed."""

    def __init__(self, env: Any, group: str = "hunter") -> None:
        self.size = env.description.groups[group].n_agents
        self.group = group
        space = spaces.Box(-np.inf, np.inf, (self.size,), np.float32)
        super().__init__(env, observe={group: {"reputation": space}})
        self.reputation = np.zeros((*env.batch_size, self.size), np.float32)

    def after_reset(self, begun: Any, seed: Any) -> None:
        begins = zip(np.atleast_1d(begun), np.atleast_1d(seed), strict=True)
        for world, world_seed in begins:
            noise = np.random.default_rng(world_seed).normal(size=self.size)
            self.reputation[world] = noise
        reputations = self.row[self.group, "observation", "reputation"]
        reputations[begun] = self.reputation[..., None, :][begun]

    def after_step(self) -> None:
        done = self.row[self.group, "done"][..., 0]
        actions = np.where(done, 0, self.row[self.group, "action"])
        self.reputation += 0.1 * (actions - self.reputation)
        reputations = self.row[self.group, "observation", "reputation"]
        reputations[...] = self.reputation[..., None, :]


class Doubled(EnvWrapper):
    """Observations are twice as large, in the same space."""

    def __init__(self, env: Any) -> None:
        self.keys = [
            key for key in env.description.observed() if key[1:2] == ("observation",)
        ]
        super().__init__(env, writes=self.keys)

    def after_reset(self, begun: Any, seed: Any) -> None:
        self.after_step()

    def after_step(self) -> None:
        for key in self.keys:
            np.multiply(self.env_row[key], 2, out=self.row[key])


class FewActions(EnvWrapper):
    """Hunters have two actions, which become the first and the last of four."""

    def __init__(self, env: Any) -> None:
        hunters = replace(env.description.groups["hunter"], action=spaces.Discrete(2))
        groups = {**env.description.groups, "hunter": hunters}
        super().__init__(env, replace(env.description, groups=groups))

    def before_step(self) -> None:
        self.env_row["hunter", "action"][...] = 3 * self.row["hunter", "action"]


def counting(**options: Any) -> CountingEnv:
    return CountingEnv(min_length=4, max_length=9, **options)


def scripted() -> PettingZooWrapper:
    return PettingZooWrapper(ScriptedEnv(COMINGS_AND_GOINGS), done_on_any=False)


def turns() -> PettingZooWrapper:
    return PettingZooWrapper(ScriptedTurns(SHORT_TURNS))


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "counting": counting,
    "masks": partial(counting, action_mask=True, state=True, episode_reward=True),
    "nested": partial(counting, image=(4, 4, 3), mask=False),
    "one-hot": partial(counting, categorical_actions=False),
    "joins and returns": scripted,
    "turns": turns,
}


@pytest.mark.parametrize("make_env", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("wrapper", [Plain, OthersRewards, Bonus])
def test_the_contract_is_fulfilled(make_env: Callable[[], Any], wrapper: Any) -> None:
    check_env(lambda: wrapper(make_env()))
    check_env(
        lambda: (
            OthersRewards(wrapper(make_env()))
            if wrapper is Bonus
            else wrapper(Bonus(make_env()))
        )
    )


@pytest.mark.parametrize("wrapper", [Reputation, Doubled, FewActions])
def test_other_wrappers_fulfil_the_contract(wrapper: Any) -> None:
    check_env(lambda: wrapper(counting()))
    check_env(lambda: wrapper(OthersRewards(counting())))


WORLDS: dict[str, dict[str, Any]] = {
    "agents die": {},
    "masks": {"action_mask": True, "state": True, "episode_reward": True},
    "the first death ends": {"done_on_any": True},
    "nested": {"image": (4, 4, 3), "mask": False},
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": Plain,
    "observations": OthersRewards,
    "rewards": Bonus,
    "state of worlds": Reputation,
    "written anew": Doubled,
    "wrapped twice": lambda env: OthersRewards(Reputation(Bonus(env))),
}
K = 4


def worlds(**options: Any) -> CountingWorlds:
    return CountingWorlds(K, min_length=4, max_length=9, **options)


@pytest.mark.parametrize("options", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_worlds_give_the_data_of_wrapped_environments(
    wrapper: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    keywords: Any = {"frames_per_batch": 30 * K, "total_frames": 60 * K, "seed": 5}
    singles = [lambda: wrapper(counting(**options))] * K
    with (
        Collector(singles, **keywords) as expected,
        Collector(lambda: wrapper(worlds(**options)), **keywords) as actual,
    ):
        for expected_batch, actual_batch in zip(expected, actual, strict=True):
            keys = [set(b.keys(True, True)) for b in (expected_batch, actual_batch)]
            assert keys[0] == keys[1]
            assert (expected_batch == actual_batch).all()
            assert expected_batch["next", "done"].any()


def test_worlds_that_begin_by_themselves_are_wrapped() -> None:
    def make_env() -> EnvWrapper:
        return OthersRewards(worlds(resets_itself=True))

    check_env(make_env)
    batch = frames(make_env)
    dones = batch["next", "done"][:, :-1, 0]
    first_rewards = batch["hunter", "observation", "rewards"][:, 1:]
    assert dones.any()
    assert (first_rewards[dones] == 0).all()
    assert (first_rewards[~dones] != 0).any()


@pytest.mark.processes
def test_wrapped_worlds_are_stepped_and_rendered() -> None:
    env = Bonus(worlds())
    assert env.batch_size == (K,)
    assert env.worlds == K
    assert env.rollout(3).shape == (K, 3)
    with pytest.raises(ValueError, match="cannot step only 1 of them"):
        env.step(env.rand_action(env.reset()).set("_step", torch.arange(K) == 0))
    assert env.render(2) is None
    env.close()
    assert env.env.is_closed


def frames(make_env: Callable[[], Any], policy: Any = None, **options: Any) -> Any:
    with Collector(
        make_env, policy, frames_per_batch=60, total_frames=60, seed=5, **options
    ) as collector:
        return collector.next()


def test_what_a_wrapper_leaves_alone_is_the_same_memory() -> None:
    env = OthersRewards(Reputation(counting(image=(4, 4, 3), state=True)))
    row = allocate(env.description.row())
    env.bind(row)
    inside = env.env.env_row
    assert inside["state",] is row["state",]
    image = row["hunter", "observation", "image"]
    assert inside["hunter", "observation", "image"] is image
    prey = row["prey", "observation", "observation"]
    assert inside["prey", "observation"] is prey
    doubled = Doubled(counting())
    doubled.bind(row := allocate(doubled.description.row()))
    observation = ("hunter", "observation")
    assert not np.shares_memory(doubled.env_row[observation], row[observation])
    assert doubled.env_row["hunter", "action"] is row["hunter", "action"]


def test_an_agent_that_returns_has_a_row_again() -> None:
    batch = frames(lambda: Bonus(scripted()))[0]
    plain = frames(scripted)[0]
    acts = ~plain["agent", "done"][..., 0]
    gained = batch["next", "agent", "reward"] - plain["next", "agent", "reward"]
    gained = gained[..., 0]
    returned = ~plain["next", "agent", "done"][..., 0] & ~acts
    assert returned.any()
    assert (gained[acts | returned] == 1).all()
    assert (gained[~acts & ~returned] == 0).all()


@pytest.mark.parametrize("make_env", [counting, worlds])
def test_actions_are_translated(make_env: Callable[..., Any]) -> None:
    batch = frames(lambda: FewActions(make_env(deaths=False)))
    action = batch["hunter", "action"]
    assert set(action.unique().tolist()) == {0, 1}
    # A hunter observes the action that its environment got.
    observed = batch["next", "hunter", "observation"][..., 4]
    assert (observed == 3 * action).all()


def test_observations_of_the_same_space_are_written_anew() -> None:
    plain, doubled = frames(turns), frames(lambda: Doubled(turns()))
    key = ("agent_0", "observation")
    assert (doubled[key] == 2 * plain[key]).all()
    assert plain[key].any()


def test_a_wrapper_has_the_attributes_of_what_it_wraps() -> None:
    env = Bonus(scripted())
    assert env.is_parallel
    assert env.description.name == "Bonus(scripted_v0)"
    assert repr(env).startswith('Bonus("Bonus(')
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = env.nothing
    env.close()
    assert env.env.is_closed
    picture = Plain(CountingEnv()).render()
    assert picture is not None
    assert np.array_equal(picture, CountingEnv().render())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"observe": {"wolves": {}}}, ValueError, "has the groups .'hunter', 'prey'"),
        (
            {"observe": {"hunter": {"observation": spaces.Discrete(2)}}},
            ValueError,
            "observes .'observation'. already: choose other names",
        ),
        ({"writes": [("hunter", "speed")]}, ValueError, "not in the row: found"),
        (
            {"description": CountingEnv(n_prey=0).description},
            ValueError,
            "keeps the groups and agents",
        ),
        (
            {"description": CountingEnv(n_prey=1).description},
            ValueError,
            "keeps the groups and agents",
        ),
    ],
)
def test_errors_name_what_is_wrong(
    arguments: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Plain(CountingEnv(), **arguments)


def test_only_environments_are_wrapped() -> None:
    with pytest.raises(TypeError, match="wraps an environment of marl_collect, but"):
        Plain(SerialEnv(2, CountingEnv))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lambda: Plain\(factory\(\)\)"):
        Plain(CountingEnv)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Pass `PettingZooWrapper\(ScriptedEnv"):
        Plain(ScriptedEnv(Script()))
