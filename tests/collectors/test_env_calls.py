"""``call_env`` changes environments between batches, and its effect is never lost."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.worlds import CountingWorlds

from marl_collect import (
    Collector,
    EnvDescription,
    GroupDescription,
    MultiAgentEnv,
    MultiAsyncCollector,
    MultiSyncCollector,
    RandomPolicy,
)
from marl_collect.core.flags import Flags
from marl_collect.errors import WorkerError, worker_error_of
from marl_collect.rollout.env_calls import EnvCall

TEAM = GroupDescription(
    ("left", "right"), spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Discrete(3)
)
ENVS, FRAMES = 4, 7


class Windy(MultiAgentEnv):
    """Robots that the wind moves in every step. Episodes begin on a height."""

    def __init__(self, length: int = 11, *, repeats: bool = True) -> None:
        self.repeats, self.length = repeats, length
        self.wind = 0.0
        self.height = 0

    @property
    def description(self) -> EnvDescription:
        return EnvDescription("windy", {"team": TEAM}, repeats=self.repeats)

    def bind(self, row: Any) -> None:
        self.row, self.flags = row, Flags(row, self.description)

    def reset_row(self, seed: int) -> None:
        self.at = np.random.default_rng(seed).normal(size=2) + 100 * self.height
        self.steps = 0
        self.flags.clear()
        self.row["team", "mask"].fill(True)
        self.look()

    def step_row(self) -> None:
        self.at = self.at + self.row["team", "action"] - 1 + self.wind
        self.steps += 1
        self.row["team", "reward"][...] = self.wind
        self.look()
        if self.steps == self.length:
            self.flags.end_all(terminated=False, truncated=True)

    def look(self) -> None:
        seen = self.row["team", "observation"]
        seen[:, 0], seen[:, 1], seen[:, 2] = self.at, self.wind, self.height

    def set_wind(self, wind: float) -> float:
        before, self.wind = self.wind, wind
        return before

    def set_height(self, *, height: int) -> int:
        self.height = height
        return os.getpid()

    def fail(self, wind: float) -> None:
        if self.wind == wind:
            raise OSError(f"no wind of {wind}")


def lengths(first: int = 5) -> list[Callable[[], Windy]]:
    return [partial(Windy, first + 3 * k) for k in range(ENVS)]


def collector_of(kind: Any, factories: Any = None, **options: Any) -> Any:
    factories = lengths() if factories is None else factories
    return kind(
        factories,
        RandomPolicy(),
        **{"frames_per_batch": ENVS * FRAMES, "seed": 3} | options,
    )


def winds(batch: Any) -> Any:
    return batch["team", "observation"][..., 0, 1]


def test_results_are_in_the_order_of_the_environments() -> None:
    with collector_of(MultiSyncCollector) as collector:
        for k in range(ENVS):
            collector.call_env("set_wind", float(k), environments=[k])
        assert collector.call_env("set_wind", 9) == [0.0, 1.0, 2.0, 3.0]
        pids = collector.call_env("set_height", height=1)
        assert pids == list(collector.worker_pids)
        assert collector.call_env("set_wind", 9, environments=[]) == []


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_error_names_its_environment(kind: Any) -> None:
    with collector_of(kind) as collector:
        collector.call_env("set_wind", 3.0, environments=[2])
        with pytest.raises(OSError, match=r"no wind of 3\.0") as error:
            collector.call_env("fail", 3.0)
        if kind is Collector:
            assert "environment 2" in error.value.__notes__[0]
        else:
            cause = worker_error_of(error.value)
            assert isinstance(cause, WorkerError)
            assert cause.environment == 2
        assert (winds(collector.next())[2, 1:] == 3).all()


@pytest.mark.parametrize(
    ("name", "args", "options", "error", "message"),
    [
        ("_hidden", (), {}, AttributeError, "_hidden"),
        ("reset", (), {}, AttributeError, "collector resets"),
        ("missing", (), {}, AttributeError, "missing"),
        ("set_wind", (np.zeros(2),), {}, TypeError, "ndarray"),
        (3, (), {}, TypeError, "name must be a string"),
        *(
            ("set_wind", (1,), {"environments": chosen}, TypeError, "indices of env")
            for chosen in (0, "0", [0.0], [[0]], [True, False, True, False])
        ),
        ("set_wind", (1,), {"environments": [4]}, IndexError, "0 to 3"),
        ("set_wind", (1,), {"environments": [-1]}, IndexError, "0 to 3"),
    ],
)
def test_what_is_refused(
    name: str, args: Any, options: Any, error: type[Exception], message: str
) -> None:
    with collector_of(Collector) as collector:
        with pytest.raises(error, match=message):
            collector.call_env(name, *args, **options)
        collector.call_env("set_wind", np.float32(0.5))
        assert collector.call_env("set_wind", 0) == [0.5] * ENVS


def test_nor_does_the_batch_of_an_async_worker() -> None:
    options = {"frames_per_batch": FRAMES, "num_workers": 2}
    with collector_of(MultiAsyncCollector, Windy, **options) as collector:
        seen: dict[int, list[Any]] = {0: [], 1: []}
        for _ in range(2):
            add(seen, collector.next())
        collector.call_env("set_wind", 1.0)
        before = [len(batches) for batches in seen.values()]
        while min(map(len, seen.values())) < 5:
            add(seen, collector.next())
    for batches, count in zip(seen.values(), before, strict=True):
        # At most one batch was in progress, and one was waiting for its delivery.
        still = [bool((batch == 0).all()) for batch in batches]
        changed = still.index(False)
        assert count <= changed <= count + 1
        assert all((batch[:, 1:] == 1).all() for batch in batches[changed:])


def add(seen: dict[int, list[Any]], batch: Any) -> None:
    worker = int(batch["collector", "traj_ids"][0, 0]) >> 32
    seen[worker].append(winds(batch).clone())


class Greedy(Windy):
    """Empties what it is given."""

    def take(self, levels: list[int]) -> int:
        taken = len(levels)
        levels.clear()
        return taken


def test_environments_do_not_share_the_arguments_of_a_call() -> None:
    with collector_of(Collector, [Greedy] * ENVS) as collector:
        assert collector.call_env("take", [1, 2, 3]) == [3] * ENVS
        collector.next()
        (worker,) = collector.state_dict()["workers"]
    assert worker["calls"]["made"][0]["args"] == ([1, 2, 3],)


def test_an_argument_that_contains_itself_is_an_error() -> None:
    levels: list[Any] = [1, {}, {}]
    levels[1]["again"] = levels
    with collector_of(Collector, [Greedy] * ENVS) as collector:
        with pytest.raises(ValueError, match="one is a list that contains itself"):
            collector.call_env("take", levels)
        twice = [[1], [2]]
        assert collector.call_env("take", [twice, twice]) == [2] * ENVS


class Opening(Windy):
    """Its results cannot be sent."""

    def open(self, wind: float) -> Any:
        self.wind = wind
        return threading.Lock()


@pytest.mark.filterwarnings("ignore")
def test_a_call_whose_result_cannot_be_sent_is_made_again_by_a_replacement() -> None:
    envs = [Opening] * ENVS
    options = {"on_worker_failure": "restart"}
    with collector_of(MultiSyncCollector, envs, **options) as collector:
        with pytest.raises(TypeError, match="result is a lock, which cannot be sent"):
            collector.call_env("open", 1.5)
        collector.next()
        for pid in collector.worker_pids:
            os.kill(pid, signal.SIGKILL)
        batch = collector.next()
        assert collector.stats()["restarts"] == ENVS
    assert (winds(batch) == 1.5).all()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_call_is_not_compared_with_all_others(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = 0

    def count(call: EnvCall, other: object) -> bool:
        nonlocal comparisons
        comparisons += 1
        return vars(call) == vars(other)

    monkeypatch.setattr(EnvCall, "__eq__", count)
    with collector_of(kind) as collector:
        for n in range(40):
            collector.call_env("set_wind", n)
    assert comparisons <= 2 * 40 * ENVS


def test_equal_calls_do_not_pile_up() -> None:
    with collector_of(Collector) as collector:
        for n in range(40):
            collector.call_env("set_wind", n % 2)
            collector.next()
        (worker,) = collector.state_dict()["workers"]
        assert len(worker["calls"]["made"]) < 10


def named_worlds() -> Any:
    env: Any = CountingWorlds(3)

    def name(prefix: str) -> str:
        env.prefix = prefix
        return f"{prefix}{env.worlds}"

    env.name = name
    return env


def test_a_simulator_is_called_once_for_all_of_its_worlds() -> None:
    worlds = [named_worlds] * 2
    with MultiSyncCollector(worlds, RandomPolicy(), frames_per_batch=12) as both:
        assert both.call_env("name", "x") == ["x3", "x3"]
        assert both.call_env("name", "y", environments=[3, 4, 5]) == ["y3"]
        assert both.getattr_env("prefix") == [["x"], ["y"]]
        with pytest.raises(ValueError, match="one simulator"):
            both.call_env("name", "z", environments=[0, 3, 4, 5])
        with pytest.raises(AttributeError, match="the collector does that"):
            both.call_env("begin")
        assert both.call_env("name", "w") == ["w3", "w3"]


def test_a_state_cannot_call_what_is_not_public() -> None:
    with collector_of(Collector) as collector:
        collector.call_env("set_wind", 1)
        state = collector.state_dict()
        state["workers"][0]["calls"]["made"][0]["name"] = "__init__"
        with pytest.raises(AttributeError, match="__init__"):
            collector.load_state_dict(state)
