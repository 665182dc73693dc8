"""Families give the data of their library's own environment: a row of a table each."""

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray
from support.scripts import run_python

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

import torch
from zoo_tools import BoundEnv

from marl_collect import Collector, RandomPolicy, check_env, envs
from marl_collect.cli.tasks import find_factory
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import (
    AgentLists,
    MatrixGameEnv,
    PettingZooWrapper,
    UnknownTaskError,
)
from marl_collect.envs.matrix.provider import FAMILY
from marl_collect.envs.pettingzoo.description import PettingZooOptions
from marl_collect.errors import ClosedError

Entries = Mapping[tuple[str, ...], Any]
FORAGING, COOP = "Foraging-5x5-3p-1f-v3", "Foraging-2s-8x8-2p-3f-coop-v3"
WAREHOUSE = "rware-tiny-2ag-v2"
TERMINATED, TRUNCATED = (True, False), (False, True)


class Stock:
    """A library's environment: what is seen, and what came of a step."""

    def __init__(self, task: str, **arguments: Any) -> None:
        """Build it."""
        self.task, self.arguments = task, arguments
        self.frame = 0

    def begin(self, seed: int) -> None:
        """Begin an episode."""

    def seen(self) -> Entries:
        """Return the entries of the current frame; none if there are no more."""
        raise NotImplementedError

    def step(self, actions: Entries) -> tuple[Entries, bool, bool]:
        """Return rewards, and whether the episode is terminated and truncated."""
        raise NotImplementedError


class Lists(Stock):
    """Level-based foraging and the warehouse, which have lists of agents."""

    def begin(self, seed: int) -> None:
        if self.frame == 0 or self.task.startswith("Foraging"):
            # New players have no position, so a new environment has no seed defect.
            # The warehouse's reset forgets the last episode.
            self.env = gymnasium.make(
                self.task, disable_env_checker=True, **self.arguments
            )
        self.frame = 0
        self.observations, _ = self.env.reset(seed=seed)

    def seen(self) -> Entries:
        return {("agent", "observation"): np.stack(self.observations)}

    def step(self, actions: Entries) -> tuple[Entries, bool, bool]:
        self.frame += 1
        answer = self.env.step(list(actions["agent", "action"]))
        self.observations, rewards, over, _, _ = answer
        inner: Any = self.env.unwrapped
        foraging = self.task.startswith("Foraging")
        at_limit = self.frame == (50 if foraging else self.arguments["max_steps"])
        empty = foraging and not inner.field.any()
        assert over == (empty or at_limit)  # which the library calls a termination
        return {("agent", "reward"): rewards}, empty, at_limit


class Robots(Stock):
    """MaMuJoCo's parallel environment."""

    def begin(self, seed: int) -> None:
        from gymnasium_robotics import mamujoco_v1

        if self.frame == 0:
            robot = self.task.split("-")
            self.env = mamujoco_v1.parallel_env(*robot, **self.arguments)
            with envs.MamujocoEnv(self.task, **self.arguments) as ours:
                self.groups = ours.group_map
        self.frame += 1
        self.observations, _ = self.env.reset(seed=seed)

    def _by_group(self, values: Mapping[str, Any], name: str) -> Entries:
        return {
            (group, name): np.stack([values[agent] for agent in agents])
            for group, agents in self.groups.items()
        }

    def seen(self) -> Entries:
        return self._by_group(self.observations, "observation")

    def step(self, actions: Entries) -> tuple[Entries, bool, bool]:
        by_agent = {
            agent: actions[group, "action"][row]
            for group, agents in self.groups.items()
            for row, agent in enumerate(agents)
        }
        self.observations, rewards, *flags, _ = self.env.step(by_agent)
        terminated, truncated = ({*flag.values()} for flag in flags)
        return self._by_group(rewards, "reward"), True in terminated, True in truncated


class Kitchen(Stock):
    """Overcooked-AI's environment, which needs gym and an old NumPy."""

    def begin(self, seed: int) -> None:
        envs.OvercookedEnv("cramped_room").close()  # imports the package
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "gym", gymnasium)
            patch.setattr(np, "Inf", np.inf, raising=False)
            from overcooked_ai_py.mdp.actions import Action
            from overcooked_ai_py.mdp.overcooked_env import OvercookedEnv
            from overcooked_ai_py.mdp.overcooked_mdp import OvercookedGridworld
        self.actions = Action.INDEX_TO_ACTION
        mdp = OvercookedGridworld.from_layout_name(self.task)
        self.env = OvercookedEnv.from_mdp(mdp, horizon=60, info_level=0)
        self.env._mp = object()  # It would be computed, written to a file, not used.

    def seen(self) -> Entries:
        encoded = self.env.lossless_state_encoding_mdp(self.env.state)
        return {("player", "observation"): np.stack(encoded)}

    def step(self, actions: Entries) -> tuple[Entries, bool, bool]:
        joint = [self.actions[action] for action in actions["player", "action"]]
        _, sparse, over, infos = self.env.step(joint)
        extra = np.array(infos["shaped_r_by_agent"])
        outcome = {
            ("player", "reward"): sparse + 0.5 * extra,
            ("player", "info", "shaped_reward"): extra,
        }
        return outcome, False, over


class Game(Stock):
    """A game, stepped with pyspiel alone; chance is drawn as Shimmy does."""

    def begin(self, seed: int) -> None:
        import pyspiel

        game = pyspiel.load_game(self.task, self.arguments)
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.kind, self.players = game.get_type(), game.num_players()
        self.state = game.new_initial_state()
        self.chosen: list[int] = []
        self._draw()

    @property
    def player(self) -> int:
        if self.state.is_simultaneous_node():
            return len(self.chosen)
        return int(self.state.current_player())

    def seen(self) -> Entries:
        if self.state.is_terminal():
            return {}
        player = self.player
        observe = (
            self.state.observation_tensor
            if self.kind.provides_observation_tensor
            else self.state.information_state_tensor
        )
        agent = f"player_{player}"
        legal = np.zeros(self.state.get_game().num_distinct_actions(), bool)
        legal[self.state.legal_actions(player)] = True
        acts: Any = {(f"player_{p}", "mask"): p == player for p in range(self.players)}
        return {
            (agent, "observation"): observe(player),
            (agent, "action_mask"): legal,
            **acts,
        }

    def step(self, actions: Entries) -> tuple[Entries, bool, bool]:
        action = int(actions[f"player_{self.player}", "action"].item())
        before = np.array(self.state.returns())
        if self.state.is_simultaneous_node():
            self.chosen.append(action)
            if len(self.chosen) == self.players:
                self.state.apply_actions(self.chosen)
                self.chosen = []
        else:
            self.state.apply_action(action)
        self._draw()
        rewards = np.array(self.state.returns()) - before
        by_player: Any = {(f"player_{p}", "reward"): r for p, r in enumerate(rewards)}
        return by_player, self.state.is_terminal(), False

    def _draw(self) -> None:
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(self.random.choice(outcomes, p=chances))


@dataclass(frozen=True)
class Case:
    """A task, whose frames are compared."""

    task: str  # with its family
    stock: type[Stock]  # the library's environment
    frames: int = 120  # how many are compared
    ends: tuple[tuple[bool, bool], ...] = (TRUNCATED,)  # (terminated, truncated)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the task
    ours: Mapping[str, Any] = field(default_factory=dict)  # of our environment only
    checked: Mapping[str, Any] = field(default_factory=dict)  # also passes `check_env`

    @property
    def name(self) -> str:
        """Of the task, without its family."""
        return self.task.partition("/")[2]


SHAPED = {"shaping": 0.5, "info_keys": ["shaped_reward"], "horizon": 60}
game = partial(Case, stock=Game, frames=150, ends=(TERMINATED,))
CASES = [
    Case(f"lbforaging/{FORAGING}", Lists, 600, (TERMINATED, TRUNCATED)),
    Case(
        f"lbforaging/{COOP}", Lists, 300, checked={"agent_ids": True, "time_limit": 9}
    ),
    Case(f"rware/{WAREHOUSE}", Lists, arguments={"max_steps": 30}),
    Case(
        "rware/rware-small-4ag-hard-v2",
        Lists,
        arguments={"max_steps": 45},
        checked={"msg_bits": 2, "reward_type": "global", "agent_ids": True},
    ),
    Case("mamujoco/Ant-4x2", Robots, arguments={"max_episode_steps": 40}),
    Case("mamujoco/Hopper-3x1", Robots, 120, (TERMINATED,), {"agent_obsk": 0}),
    Case("mamujoco/Swimmer-2x1", Robots, arguments={"max_episode_steps": 30}),
    Case("overcooked/cramped_room", Kitchen, 600, ours=SHAPED),
    Case("overcooked/asymmetric_advantages_tomato", Kitchen, 300, ours=SHAPED),
    game("openspiel/kuhn_poker"),
    game("openspiel/tiny_hanabi"),
    game("openspiel/goofspiel", arguments={"num_cards": 4, "imp_info": True}),
    game("openspiel/leduc_poker", arguments={"players": 3}),
    # Rewards before the end.
    game("openspiel/hanabi", arguments={"colors": 3, "ranks": 3, "hand_size": 2}),
    # Rewards, chance events, simultaneous actions.
    game("openspiel/laser_tag", arguments={"horizon": 20}),
    game("openspiel/tic_tac_toe"),
]
NEEDED = {
    "lbforaging": "lbforaging",
    "rware": "rware",
    "mamujoco": "gymnasium_robotics",
    "overcooked": "overcooked_ai_py",
    "openspiel": "pyspiel",
}


def require(task: str) -> None:
    """Skip the test if the library of a task is missing."""
    family = task.partition("/")[0]
    if importlib.util.find_spec(NEEDED[family]) is None:
        pytest.skip(f"needs the extra {family}")


def episodes(
    factory: Callable[[], Any], frames: int, seed: int = 0
) -> Iterator[tuple[int, dict[tuple[str, ...], NDArray[Any]]]]:
    """Yield seed and arrays ``[T, ...]`` of each episode of random legal actions."""
    options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": frames}
    with Collector(factory, RandomPolicy(), seed=seed, **options) as collector:
        (batch,) = collector
    frames_of_all: Any = batch[0]
    numbers = frames_of_all["collector", "traj_ids"]
    keys = frames_of_all.keys(include_nested=True, leaves_only=True)
    for number in numbers.unique().tolist():
        rows = frames_of_all[numbers == number]
        yield (
            episode_seed(seed, 0, number),
            {k if isinstance(k, tuple) else (k,): rows[k].numpy() for k in keys},
        )


def assert_equal(recorded: Mapping[Any, Any], step: int, *parts: Any) -> None:
    """Compare the entries of a frame bit by bit; expected ones are cast first."""
    *prefix, expected = parts
    for key, value in expected.items():
        actual = recorded[*prefix, *key][step]
        cast = np.asarray(value).astype(actual.dtype).reshape(actual.shape)
        assert np.array_equal(actual, cast), (key, step, actual, cast)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.task)
def test_the_data_are_those_of_the_library(case: Case) -> None:
    require(case.task)
    factory = find_factory(case.task, {**case.arguments, **case.ours})
    stock = case.stock(case.name, **case.arguments)
    ends = set()
    for seed, episode in episodes(factory, case.frames, seed=1):
        stock.begin(seed)
        seen = stock.seen()
        taken = [key for key in episode if key[1:] == ("action",)]
        length = len(episode["done",])
        for step in range(length):
            assert_equal(episode, step, seen)
            actions = {key: episode[key][step] for key in taken}
            outcome, terminated, truncated = stock.step(actions)
            assert_equal(episode, step, "next", outcome)
            seen = stock.seen()
            assert_equal(episode, step, "next", seen)
            flags = {"terminated": terminated, "truncated": truncated}
            groups = {key[0] for key in taken}
            for name, flag in flags.items():
                for where in ((), *((group,) for group in groups)):
                    assert (episode["next", *where, name][step] == flag).all(), step
            if terminated or truncated:
                assert step == length - 1
                ends.add((terminated, truncated))
    assert set(case.ends) <= ends


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.task)
def test_check_env(case: Case) -> None:
    require(case.task)
    factory = find_factory(case.task, {**case.arguments, **case.ours, **case.checked})
    check_env(factory, episodes=2, steps=60)
    env = factory()
    root = env.rand_action(env.reset())
    env.close()
    for use in (env.reset, env.rand_step, partial(env.step, root)):
        with pytest.raises(ClosedError, match="is closed: build a new one"):
            use()
    assert set(root.keys()) < set(env.fake_tensordict().keys())


@pytest.mark.parametrize(
    ("task", "limits"),
    [
        (f"rware/{WAREHOUSE}", [({}, 500), ({"time_limit": 40}, 40)]),
        (f"rware/{WAREHOUSE}", [({"max_steps": 9}, 9), ({"max_steps": None}, None)]),
        (f"lbforaging/{COOP}", [({}, 50), ({"time_limit": 7}, 7)]),
        ("mamujoco/Reacher-2x1", [({}, 50)]),
        ("mamujoco/Ant-2x4", [({}, 1000), ({"time_limit": 30}, 30)]),
        ("overcooked/cramped_room", [({}, 400), ({"horizon": 50}, 50)]),
        ("openspiel/goofspiel", [({}, None), ({"time_limit": 5}, 5)]),
    ],
)
def test_the_limit_is_that_of_the_task_or_a_shorter_one(task: str, limits: Any) -> None:
    require(task)
    for keywords, limit in limits:
        with find_factory(task, keywords)() as env:
            assert env.description.time_limit == limit


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (f"rware/{WAREHOUSE}", "rware.warehouse:Warehouse"),
        (f"lbforaging/{COOP}", "lbforaging.foraging.environment:ForagingEnv"),
        ("mamujoco/Ant-2x4", "gymnasium_robotics:mamujoco_v1.parallel_env"),
    ],
)
def test_an_error_of_a_constructor_closes_what_it_built(
    task: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(task)
    closed: list[Any] = []

    def close(self: Any) -> None:
        closed.append(self)

    monkeypatch.setattr(pkgutil.resolve_name(kind), "close", close)
    monkeypatch.setattr(PettingZooOptions, "with_limit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find_factory(task, {})()
    assert len(closed) == 1


@pytest.mark.parametrize(
    "task",
    [
        *("mamujoco/Pusher-3p", "mamujoco/Ant-3x3", "overcooked/no_room"),
        # A mean-field game, one with sampled chance, and one without tensors.
        *("openspiel/mfg_garnet", "openspiel/negotiation", "openspiel/coin_game"),
    ],
)
def test_tasks_that_cannot_be_collected_are_not_found(task: str) -> None:
    require(task)
    with pytest.raises(ValueError, match="no task|Did you mean|not found|find"):
        find_factory(task, {})


def test_the_last_food_in_the_frame_of_the_limit_is_a_termination() -> None:
    require("lbforaging/")
    env = envs.LbForagingEnv(FORAGING, max_episode_steps=1)
    env.set_seed(0)
    root = env.reset()
    wrapped_env: Any = env.env
    wrapped_env._env.unwrapped.field[:] = 0
    data = env.step(root.update(env.rand_action(root.clone())))
    assert data["next", "terminated"].item()
    assert data["next", "truncated"].item()
    env.close()


def test_a_task_of_a_class_of_ones_own_is_built() -> None:
    lbforaging = pytest.importorskip("lbforaging.foraging")
    kind: Any = type("Own", (lbforaging.ForagingEnv,), {})
    arguments = gymnasium.spec(FORAGING).kwargs
    gymnasium.register("OwnForaging-v0", kind, kwargs=arguments)
    try:
        with envs.LbForagingEnv("OwnForaging-v0") as env:
            assert env.n_agents == 3
    finally:
        del gymnasium.registry["OwnForaging-v0"]


def test_a_time_limit_makes_a_truncation_of_a_stock_environment() -> None:
    pytest.importorskip("lbforaging")  # registers its tasks
    for keywords, terminated in (({}, True), ({"time_limit": 50}, False)):
        stock = gymnasium.make("Foraging-8x8-2p-3f-coop-v3", disable_env_checker=True)
        env = PettingZooWrapper(AgentLists(stock), repeats=False, **keywords)  # type: ignore[arg-type]
        env.set_seed(0)
        last = env.rollout(60)[-1]["next"]
        assert last["terminated"].item() is terminated
        assert last["truncated"].item() is not terminated


def test_a_task_changes_the_levels_of_one_episode() -> None:
    pytest.importorskip("lbforaging")
    env = envs.LbForagingEnv("Foraging-8x8-2p-2f-v3")

    def levels(seed: int, task: dict[str, Any]) -> tuple[Any, Any]:
        env.set_task(task)
        seen = env.reset(seed=seed)["agent", "observation"][0]
        return seen[[2, 5]], seen[[8, 11]]  # Of food and players.

    initial = [levels(seed, {}) for seed in range(20)]
    for seed, (before_food, before_players) in enumerate(initial):
        food, players = levels(seed, {"force_coop": True})
        assert (food == players.sum()).all()
        food, players = levels(seed, {"max_player_level": 1, "max_food_level": [1, 2]})
        assert (players == 1).all()
        assert set(food.tolist()) <= {1.0, 2.0}
        again = levels(seed, {})
        assert (again[0] == before_food).all()
        assert (again[1] == before_players).all()
    assert len({tuple(food.tolist()) for food, _ in initial}) > 2
    with pytest.raises(ValueError, match=r"max_player_level=3 exceeds 2, the highest"):
        env.set_task({"max_player_level": 3})
    with pytest.raises(ValueError, match="but found \\['players'\\]"):
        env.set_task({"players": 3})


def test_names_of_papers_are_tasks_with_their_arguments() -> None:
    require("lbforaging/")
    for name, agents, foods in [("8x8-2p-2f-coop", 2, 2), ("15x15-4p-5f", 4, 5)]:
        for keywords, expected in (({}, foods), ({"max_num_food": 1}, 1)):
            with find_factory(f"lbforaging/{name}", keywords)() as env:
                assert env.description.groups["agent"].n_agents == agents
                assert env.env._env._inner.max_num_food == expected


def test_an_unknown_member_of_an_enumeration_is_an_error() -> None:
    require("rware/")
    with pytest.raises(ValueError, match="reward_type must be one of .*two_stage"):
        envs.RwareEnv(WAREHOUSE, reward_type="both")


def test_both_agents_get_the_reward_of_a_delivered_soup() -> None:
    require("overcooked/")
    north, south, east, west, stay, interact = range(6)
    onion = [east, interact, west, north, interact]
    cook = [*onion, *onion, *onion, interact, east]
    waiter = [south, interact, north] + [stay] * (len(cook) - 3)  # with a dish
    waiter += [east, north, interact, south, east, south, interact]
    cook += [stay] * (len(waiter) - len(cook))
    env = BoundEnv(envs.OvercookedEnv("cramped_room", cook_time=1))
    rewards = []
    for actions in zip(waiter, cook, strict=True):
        env.step(player=actions)
        rewards.append(env["player", "reward"].ravel().tolist())
    assert rewards[-1] == [20, 20]
    assert not np.any(rewards[:-1])


def test_layouts_in_one_process_keep_their_recipes() -> None:
    require("overcooked/")
    quick = envs.OvercookedEnv("cramped_room", cook_time=3)
    bound = BoundEnv(quick)
    BoundEnv(envs.OvercookedEnv("cramped_room", cook_time=9)).step()
    bound.step()
    lists: Any = quick.env
    assert lists._env._recipes.configuration["cook_time"] == 3
    with pytest.raises(UnknownTaskError, match="cramped_room"):
        envs.OvercookedEnv("cramped_room_single")  # for one player


@pytest.mark.processes
def test_the_package_is_imported_without_gym_and_an_old_numpy() -> None:
    require("overcooked/")
    code = """
import sys
from marl_collect.envs import OvercookedEnv
OvercookedEnv("cramped_room").close()
print([name for name in sys.modules if name.partition(".")[0] in ("gym", "pygame")])
"""
    process = run_python("-c", code, check=True, interpreter=True)
    assert process.stdout.strip() == "[]"
    assert process.stderr == ""


def test_an_unknown_parameter_of_a_game_is_an_error() -> None:
    require("openspiel/")
    import pyspiel

    with pytest.raises(pyspiel.SpielError, match="nothing"):
        envs.OpenSpielEnv("kuhn_poker", nothing=1)


CLIMBING = "11 -30 0 -30 7 0 0 6 5"
PENALTY = "k 0 10 0 2 0 10 0 k"
TABLES = {"climbing": CLIMBING} | {
    f"penalty-{size}": PENALTY.replace("k", str(-size)) for size in (0, 25, 50, 75, 100)
}
"""Claus and Boutilier 1998, row by row."""


@pytest.mark.parametrize("task", FAMILY.listed())
def test_the_payoffs_are_those_of_the_papers(task: str) -> None:
    env = BoundEnv(MatrixGameEnv(task))
    paid = []
    for pair in product(range(3), repeat=2):
        env.step(agent=pair)
        first, second = env["agent", "reward"].ravel().tolist()
        assert first == second
        paid.append(first)
    assert paid == list(map(float, TABLES[task].split()))


def test_an_episode_is_truncated_after_its_rounds() -> None:
    for keywords, length in [({}, 25), ({"rounds": 9}, 9), ({"time_limit": 7}, 7)]:
        with MatrixGameEnv("climbing", **keywords) as env:
            data = env.rollout(30)
            assert env.description.time_limit == length
        assert len(data) == length
        assert data["next", "truncated"].flatten().tolist()[-1]
        assert not data["next", "terminated"].any()
        assert torch.equal(data["agent", "observation"], torch.zeros(length, 2, 2))


def test_check_env_of_matrix_games() -> None:
    check_env(lambda: MatrixGameEnv("penalty-25", agent_ids=True), episodes=2, steps=60)


def test_other_names_and_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, but is 0"):
        MatrixGameEnv("climbing", rounds=0)
    with pytest.raises(TypeError, match="climbing has no argument size, only rounds"):
        MatrixGameEnv("climbing", size=3)
