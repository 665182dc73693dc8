"""Attributes and methods of the environments, as lists."""

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.clocks import beside, waits
from support.processes import wait_until
from workloads.counting import CountingEnv

from marl_collect.errors import WorkerError
from marl_collect.parallel_env import ParallelEnv, SerialEnv


class OddError(RuntimeError):
    pass


def numbered(number: int) -> CountingEnv:
    env: Any = CountingEnv()
    env.number = number
    env.lock = threading.Lock()

    def double(by: int = 2, *, plus: int = 0) -> Any:
        return env.number * by + plus

    def fail() -> None:
        raise OddError(f"number {env.number}")

    env.double = double
    env.fail = fail
    return env


@pytest.fixture(scope="module", params=[SerialEnv, ParallelEnv])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    options = {"num_processes": 2, "groups": 2} if request.param is ParallelEnv else {}
    kwargs = [{"number": k} for k in (4, 5, 6, 7)]
    with request.param(4, numbered, create_env_kwargs=kwargs, **options) as env:
        yield env


def test_an_attribute_is_a_list_of_each_environments_value(env: Any) -> None:
    assert env.get_attr("number") == [4, 5, 6, 7]
    assert env.number == [4, 5, 6, 7]
    assert env.engine().attribute("number") == [4, 5, 6, 7]


def test_a_method_is_called_in_each_environment(env: Any) -> None:
    assert env.call("double") == [8, 10, 12, 14]
    assert env.call("double", 3, plus=1) == [13, 16, 19, 22]


def test_what_is_no_value_of_the_environments_is_refused(env: Any) -> None:
    for name in ("nonsense", "_calls", "__deepcopy__"):
        for read in (partial(getattr, env, name), partial(env.get_attr, name)):
            with pytest.raises(AttributeError, match=name):
                read()
        assert not hasattr(env, name)
    with pytest.raises(AttributeError, match=r"env\.call\('double', \.\.\.\)"):
        env.double()
    for name in ("reset", "step", "bind", "reset_row"):  # They do not step alone.
        with pytest.raises(AttributeError, match="_step"):
            env.call(name)
    for index in (1, slice(2), [0, 2]):
        with pytest.raises(TypeError, match=r"get_attr\(name\).*\"_step\""):
            _ = env[index]
        with pytest.raises(TypeError, match="item assignment"):
            env[index] = 3
    assert env.number == [4, 5, 6, 7]


def test_an_error_in_a_method_is_raised_with_its_own_type_and_does_not_close_the_batch(
    env: Any,
) -> None:
    with pytest.raises(OddError, match="number 4") as excinfo:
        env.call("fail")
    if isinstance(env, ParallelEnv):
        assert isinstance(excinfo.value.__cause__, WorkerError)
        assert "in fail" in excinfo.value.__cause__.remote_traceback
    assert env.call("double") == [8, 10, 12, 14]
    env.rand_step(env.reset())


def test_a_value_that_cannot_be_pickled_is_an_error_and_does_not_close_the_batch() -> (
    None
):
    factory: Any = numbered
    with ParallelEnv(2, factory, create_env_kwargs={"number": 1}) as env:
        with pytest.raises((TypeError, pickle.PicklingError)):
            _ = env.lock
        assert env.number == [1, 1]


def test_an_interrupted_call_does_not_answer_the_next_one(tmp_path: Path) -> None:
    started, finish = tmp_path / "started", tmp_path / "finish"

    def slow() -> CountingEnv:
        env: Any = CountingEnv()
        env.number = 3
        env.wait = waits(started, finish)
        return env

    def interrupt() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signal.SIGINT)

    with ParallelEnv(2, slow, num_processes=1) as env:
        with beside(interrupt), pytest.raises(KeyboardInterrupt):
            env.call("wait")
        finish.touch()
        assert env.number == [3, 3]
        env.rand_step(env.reset())
        assert env.number == [3, 3]
