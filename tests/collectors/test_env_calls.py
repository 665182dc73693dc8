"""``call_env`` changes environments between batches, and its effect is never lost."""

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from support.worlds import CountingWorlds
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    EnvWrapper,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from marl_collect.errors import WorkerError, worker_error_of
from marl_collect.rollout.env_calls import EnvCall

ENVS, FRAMES = 4, 7


class Windy(EnvWrapper):
    """Rewards are the wind."""

    def __init__(self) -> None:
        super().__init__(CountingEnv(deaths=False))
        self.wind = 0.0

    def after_step(self) -> None:
        self.row["prey", "reward"][...] = self.wind

    def set_wind(self, wind: float) -> float:
        before, self.wind = self.wind, wind
        return before

    def process(self, *, plus: int) -> int:
        return os.getpid() + plus

    def fail(self, wind: float) -> None:
        if self.wind == wind:
            raise OSError(f"no wind of {wind}")

    def rise(self, wind: float) -> None:
        self.fail(5.0)
        self.wind = wind


def collector_of(kind: Any, env: Any = Windy, **options: Any) -> Any:
    factories = [env] * options.pop("environments", ENVS)
    return kind(factories, **{"frames_per_batch": ENVS * FRAMES, "seed": 3} | options)


def winds(batch: Any) -> Any:
    return batch["next", "prey", "reward"][..., 0, 0]


def test_results_are_in_the_order_of_the_environments() -> None:
    with collector_of(MultiSyncCollector) as collector:
        for k in range(ENVS):
            collector.call_env("set_wind", float(k), environments=[k])
        assert collector.call_env("set_wind", 9) == [0.0, 1.0, 2.0, 3.0]
        processes = collector.call_env("process", plus=1)
        assert processes == [pid + 1 for pid in collector.worker_pids]
        assert collector.call_env("set_wind", 9, environments=[]) == []
        assert collector.call_env("set_wind", 9, environments=[3, 1, 3]) == [9.0, 9.0]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_error_names_its_environment(kind: Any) -> None:
    ranks = {"rank": 1, "world_size": 2} if kind is Collector else {}
    with collector_of(kind, **ranks) as collector:
        collector.call_env("set_wind", 3.0, environments=[2])
        with pytest.raises(OSError, match=r"no wind of 3\.0") as error:
            collector.call_env("fail", 3.0)
        if kind is Collector:
            assert f"environment {ENVS + 2}." in error.value.__notes__[0]
        else:
            cause = worker_error_of(error.value)
            assert isinstance(cause, WorkerError)
            assert cause.environment == 2
        assert (winds(collector.next())[2] == 3).all()


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
    options = {"frames_per_batch": FRAMES, "environments": 2}
    with collector_of(MultiAsyncCollector, **options) as collector:
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
        assert all((batch == 1).all() for batch in batches[changed:])


def add(seen: dict[int, list[Any]], batch: Any) -> None:
    worker = int(batch["collector", "traj_ids"][0, 0]) >> 32
    seen[worker].append(winds(batch).clone())


class Greedy(Windy):
    def take(self, levels: list[int]) -> int:
        taken = len(levels)
        levels.clear()
        return taken


def test_environments_do_not_share_the_arguments_of_a_call() -> None:
    with collector_of(Collector, Greedy) as collector:
        assert collector.call_env("take", [1, 2, 3]) == [3] * ENVS
        collector.next()
        (worker,) = collector.state_dict()["workers"]
    assert worker["calls"]["made"][0]["args"] == ([1, 2, 3],)


def test_an_argument_that_contains_itself_is_an_error() -> None:
    levels: list[Any] = [1, {}, {}]
    levels[1]["again"] = levels
    with collector_of(Collector, Greedy) as collector:
        with pytest.raises(ValueError, match="one is a list that contains itself"):
            collector.call_env("take", levels)
        twice = [[1], [2]]
        assert collector.call_env("take", [twice, twice]) == [2] * ENVS


class Opening(Windy):
    def open(self, wind: float) -> Any:
        self.wind = wind
        return threading.Lock()


@pytest.mark.filterwarnings("ignore")
def test_a_call_whose_result_cannot_be_sent_is_made_again_by_a_replacement() -> None:
    options = {"on_worker_failure": "restart"}
    with collector_of(MultiSyncCollector, Opening, **options) as collector:
        with pytest.raises(TypeError, match="result is a lock, which cannot be sent"):
            collector.call_env("open", 1.5)
        collector.next()
        for pid in collector.worker_pids:
            os.kill(pid, signal.SIGKILL)
        batch = collector.next()
        assert collector.stats()["restarts"] == ENVS
    assert (winds(batch) == 1.5).all()


@pytest.mark.parametrize("options", [{}, {"envs_per_worker": ENVS, "environments": 1}])
def test_a_state_has_a_call_where_it_succeeded(options: Any) -> None:
    kind = MultiSyncCollector if options else Collector
    with collector_of(kind, **options) as collector:
        collector.call_env("set_wind", 5.0, environments=[2])
        with pytest.raises(OSError, match="no wind"):
            collector.call_env("rise", 1.0, environments=[1, 2, 3])
        collector.next()
        state = collector.state_dict()
    with collector_of(kind, **options) as other:
        other.load_state_dict(state)
        assert winds(other.next())[:, 0].tolist() == [0, 1, 5, 1]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("winds", [2, 40])
def test_calls_do_not_pile_up_and_are_not_compared_with_all_others(
    kind: Any, winds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = 0

    def count(call: EnvCall, other: object) -> bool:
        nonlocal comparisons
        comparisons += 1
        return vars(call) == vars(other)

    monkeypatch.setattr(EnvCall, "__eq__", count)
    with collector_of(kind) as collector:
        for n in range(40):
            collector.call_env("set_wind", n % winds)
            if winds == 2:
                collector.next()
        states = collector.state_dict()["workers"]
    assert comparisons <= 2 * 40 * ENVS
    for worker in states:
        assert len(worker["calls"]["made"]) < max(10, winds + 1)


def named_worlds() -> Any:
    env: Any = CountingWorlds(3)

    def name(prefix: str) -> str:
        env.prefix = prefix
        return f"{prefix}{env.worlds}"

    env.name = name
    return env


def test_a_simulator_is_called_once_for_all_of_its_worlds() -> None:
    worlds = [named_worlds] * 2
    with MultiSyncCollector(worlds, frames_per_batch=12) as both:
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
