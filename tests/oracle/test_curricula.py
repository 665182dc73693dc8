"""Episodes of a curriculum depend on seed, number and level, whatever the layout."""

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from oracle_seeds import episode_seed
from oracle_worlds import Together, World, curriculum
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

SEED = 5
WORLD = World(length=4, fixed=True)
maze = WORLD.build


def collector_of(kind: Any, factories: Any = maze, **options: Any) -> Any:
    defaults: dict[str, Any] = {"frames_per_batch": 36, "seed": SEED}
    defaults |= {"curriculum": curriculum}
    return kind(factories, RandomPolicy(), **defaults | options)


def follow(collector: Any, levels: Iterable[int]) -> None:
    """Collect batches, and set a level before each of them."""
    for level in levels:
        collector.set_level(level)
        collector.next()


def test_levels_reach_asynchronous_workers() -> None:
    """The oracle shows that their episodes are those of these levels."""
    levels = set()
    with collector_of(MultiAsyncCollector, num_workers=2) as collector:
        for level in range(12):
            collector.set_level(level)
            levels.update(collector.next()["collector", "level"].flatten().tolist())
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
            follow(collector, [2, 3, 4])
            (tasks,) = told(collector)
            assert {task["level"] for task in tasks.values()} <= {2, 3, 4}


class Settable(Together):
    """Has a method for tasks, as environments of RLlib."""

    def set_task(self, task: Any) -> None:
        self.told = task

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        assert options is None
        return super().reset(seed)


class Settled(Together):
    """Takes no options."""

    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed)


def test_a_method_for_tasks_is_preferred_to_options() -> None:
    def level_alone(seed: int, episode: int, level: int) -> int:
        del seed, episode
        return level

    factory = lambda: PettingZooWrapper(Settable(WORLD))  # noqa: E731
    with collector_of(Collector, factory, curriculum=level_alone) as collector:
        follow(collector, [4])
        assert told(collector) == [4]


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
            lambda: PettingZooWrapper(Settled(WORLD)),
            curriculum,
            TypeError,
            r"Settled takes no tasks: .*set_task\(task\), or a reset\(seed, options\)",
        ),
        (maze, number, TypeError, "Together has no method .* must be a mapping"),
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
