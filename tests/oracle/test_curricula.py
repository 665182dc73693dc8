"""Episodes of a curriculum depend on seed, number and level, whatever the layout."""

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from oracle_seeds import episode_seed
from pettingzoo import ParallelEnv as ZooParallelEnv
from support.worlds import CountingWorlds
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    EnvWrapper,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from marl_collect.envs.matrix.env import MatrixGameEnv
from marl_collect.envs.pettingzoo.env import PettingZooWrapper

pytestmark = pytest.mark.processes

ENVS, FRAMES, SEED = 4, 9, 5
LEVEL = ("collector", "level")


def curriculum(seed: int, episode: int, level: int) -> dict[str, Any]:
    """Return a task in which nothing is left out."""
    return {"seed": seed, "episode": episode, "level": level, "length": 3 + level % 4}


class Maze(ZooParallelEnv[str, Any, Any]):
    """Two robots, who see the task. Resets are written to a file."""

    metadata = {"name": "maze_v0"}
    possible_agents = ["robot_0", "robot_1"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        del agent
        return spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        del agent
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.task = options or {"seed": seed, "episode": -1, "level": -1, "length": 4}
        assert self.task["seed"] == seed
        self.at, self.steps = np.random.default_rng(seed).normal(), 0
        return self.look(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        self.at += sum(actions.values())
        over = self.steps == self.task["length"]
        everyone = self.agents
        self.agents = [] if over else everyone
        seen = self.look()
        return (
            seen,
            dict.fromkeys(everyone, float(self.task["level"])),
            dict.fromkeys(everyone, over),
            dict.fromkeys(everyone, False),
            {agent: {} for agent in everyone},
        )

    def look(self) -> Any:
        task = [self.task[name] for name in ("seed", "episode", "level")]
        seen = np.array([self.at, self.steps, *task])
        return dict.fromkeys(self.possible_agents, seen)


def maze() -> PettingZooWrapper:
    return PettingZooWrapper(Maze())


def collector_of(kind: Any, factories: Any = maze, **options: Any) -> Any:
    defaults: dict[str, Any] = {"frames_per_batch": ENVS * FRAMES, "seed": SEED}
    defaults |= {"curriculum": curriculum}
    return kind(factories, RandomPolicy(), **defaults | options)


def following(collector: Any, levels: Iterable[int]) -> list[Any]:
    """Return batches, and set a level before each of them."""
    batches = []
    for level in levels:
        collector.set_level(level)
        batches.append(collector.next().clone())
    return batches


def test_asynchronous_episodes_are_those_of_their_levels() -> None:
    options = {"num_workers": 2, "frames_per_batch": FRAMES}
    seen: dict[tuple[int, int], Any] = {}
    levels = set()
    with collector_of(MultiAsyncCollector, **options) as collector:
        for level in range(12):
            collector.set_level(level)
            batch = collector.next()
            frames = zip(
                batch["collector", "traj_ids"][0].tolist(),
                batch[LEVEL][0].tolist(),
                batch["robot", "observation"][0, :, 0, 2:].tolist(),
                strict=True,
            )
            for traj_id, recorded, observed in frames:
                k, number = traj_id >> 32, traj_id % 2**32
                seed = episode_seed(SEED, k, number)
                assert observed == [seed, number, recorded]
                assert seen.setdefault((k, number), recorded) == recorded
                levels.add(recorded)
    assert len(levels) > 3


def test_batches_without_a_curriculum_have_no_level() -> None:
    with collector_of(Collector, curriculum=None) as collector:
        assert "level" not in collector.next()["collector"].keys()
        assert collector.level is None
        with pytest.raises(ValueError, match="needs a curriculum"):
            collector.set_level(1)


class Lengths(CountingEnv):  # type: ignore[misc]
    """Takes a task with the method of the engine."""

    def set_task(self, task: Any) -> None:
        self.told = task


def told(env: Any) -> Any:
    return env.getattr_env("told")


def test_environments_of_ones_own_and_their_wrappers() -> None:
    for factory in (Lengths, lambda: EnvWrapper(Lengths())):
        with collector_of(Collector, factory, num_workers=2, level=5) as collector:
            for k, task in enumerate(told(collector)):
                assert task == curriculum(episode_seed(SEED, k, 0), 0, 5)


class Worlds(CountingWorlds):  # type: ignore[misc]
    """Worlds whose tasks are noted."""

    def set_task(self, world: int, task: Any) -> None:
        vars(self).setdefault("told", {})[world] = task


def test_worlds_of_a_simulator_have_tasks() -> None:
    for factory in (partial(Worlds, 3), lambda: EnvWrapper(Worlds(3))):
        with collector_of(Collector, factory, level=5) as collector:
            (tasks,) = told(collector)
            seeds = [episode_seed(SEED, k, 0) for k in range(3)]
            assert tasks == {k: curriculum(seeds[k], 0, 5) for k in range(3)}
            following(collector, [2, 3, 4])
            (tasks,) = told(collector)
            assert {task["level"] for task in tasks.values()} <= {2, 3, 4}


class Settable(Maze):
    """Has a method for tasks, as environments of RLlib."""

    def set_task(self, task: Any) -> None:
        self.next_task = {"episode": 0, "level": task, "length": 3}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        assert options is None
        task = vars(self).get("next_task", {"episode": 0, "level": -1, "length": 4})
        return super().reset(seed, task | {"seed": seed})


class Settled(Maze):
    """Takes no options."""

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed)


def test_a_method_for_tasks_is_preferred_to_options() -> None:
    def level_alone(seed: int, episode: int, level: int) -> int:
        del seed, episode
        return level

    factory = lambda: PettingZooWrapper(Settable())  # noqa: E731
    with collector_of(Collector, factory, curriculum=level_alone) as collector:
        (batch,) = following(collector, [4])
    assert (batch["robot", "observation"][..., 0, 4] == 4).all()


def number(seed: int, episode: int, level: int) -> int:
    return seed + episode + level


def unlucky(seed: int, episode: int, level: int) -> Any:
    if (episode, level) == (1, 0):
        raise LookupError("no such maze")
    return curriculum(seed, episode, level)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize(
    ("factory", "function", "error", "message"),
    [
        (CountingEnv, curriculum, TypeError, r"takes no tasks: implement set_task"),
        (
            partial(CountingWorlds, 2),
            curriculum,
            TypeError,
            r"implement set_task\(world, task\) in CountingWorlds",
        ),
        (partial(MatrixGameEnv, "penalty-0"), curriculum, TypeError, "takes no tasks"),
        (
            lambda: PettingZooWrapper(Settled()),
            curriculum,
            TypeError,
            r"Settled takes no tasks: .*set_task\(task\), or a reset\(seed, options\)",
        ),
        (maze, number, TypeError, "Maze has no method .* must be a mapping"),
    ],
)
def test_environments_that_take_no_tasks(
    kind: Any, factory: Any, function: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        collector_of(kind, factory, curriculum=function)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"curriculum": 3}, TypeError, r"must be a function curriculum\(seed, episode"),
        ({"curriculum": lambda seed: seed}, TypeError, "must take three arguments"),
        ({"level": -1}, ValueError, "at least 0"),
        ({"level": True}, TypeError, "an integer"),
        ({"level": 1.5}, TypeError, "an integer"),
        ({"level": 3, "curriculum": None}, ValueError, "pass curriculum too"),
    ],
)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_what_is_refused_before_anything_is_built(
    kind: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        collector_of(kind, lambda: pytest.fail("built"), **options)


def test_a_function_that_cannot_be_sent() -> None:
    lock = threading.Lock()

    def locked(seed: int, episode: int, level: int) -> Any:
        with lock:
            return curriculum(seed, episode, level)

    with pytest.raises(TypeError, match="curriculum cannot be sent to the workers"):
        collector_of(MultiSyncCollector, curriculum=locked)


@pytest.mark.parametrize("level", [-1, 1.0, "2", None, True])
def test_levels_are_integers(level: Any) -> None:
    with collector_of(Collector) as collector:
        with pytest.raises((TypeError, ValueError), match="level must be an integer"):
            collector.set_level(level)
        collector.set_level(np.int32(3))
        assert collector.level == 3


def lazy(seed: int, episode: int, level: int) -> Any:
    task = curriculum(seed, episode, level)
    return (entry for entry in task) if episode == 1 else task


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize(
    ("function", "kind_of_error", "message"),
    [
        (unlucky, LookupError, "no such maze"),
        (lazy, TypeError, "cannot pickle 'generator'"),  # Tasks are copied.
    ],
)
def test_an_error_of_the_function_names_the_episode(
    kind: Any, function: Any, kind_of_error: type[Exception], message: str
) -> None:
    with (
        collector_of(kind, curriculum=function) as collector,
        pytest.raises(kind_of_error, match=message) as error,
    ):
        collector.next()
    assert any("episode=1, level=0" in note for note in error.value.__notes__)


def test_states_of_collectors_with_and_without_a_curriculum() -> None:
    with (
        collector_of(Collector) as one,
        collector_of(Collector, curriculum=None) as other,
    ):
        with pytest.raises(ValueError, match="collector, but not the state"):
            one.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="state, but not the collector"):
            other.load_state_dict(one.state_dict())
