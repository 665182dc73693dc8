"""Attributes and methods of the environments, as lists."""

import pickle
import sys
import threading

import cloudpickle
import pytest

from marl_collect.errors import ClosedError, WorkerError
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.testing.counting import CountingEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class OddError(RuntimeError):
    pass


def numbered(number):
    env = CountingEnv()
    env.number = number
    env.lock = threading.Lock()

    def double(by=2, *, plus=0):
        return env.number * by + plus

    def fail():
        raise OddError(f"number {env.number}")

    env.double = double
    env.fail = fail
    return env


@pytest.fixture(params=[SerialEnv, ParallelEnv])
def env(request):
    options = {"num_processes": 2, "groups": 2} if request.param is ParallelEnv else {}
    kwargs = [{"number": k} for k in (4, 5, 6)]
    with request.param(3, numbered, create_env_kwargs=kwargs, **options) as env:
        yield env


def test_an_attribute_is_a_list_of_what_each_environment_has(env):
    assert env.number == [4, 5, 6]
    assert env.engine().attribute("number") == [4, 5, 6]


def test_a_method_is_called_in_each_environment(env):
    assert env.double() == [8, 10, 12]
    assert env.double(3, plus=1) == [13, 16, 19]


def test_a_name_that_no_environment_has_is_an_attribute_error(env):
    with pytest.raises(AttributeError, match="nonsense"):
        _ = env.nonsense
    assert not hasattr(env, "nonsense")
    assert env.number == [4, 5, 6]


@pytest.mark.parametrize("name", ["_calls", "__deepcopy__", "_repr_html_"])
def test_private_names_are_never_asked_for(env, name):
    with pytest.raises(AttributeError, match=f"Env has no attribute '{name}'"):
        getattr(env, name)


def test_an_error_in_a_method_is_raised_as_its_own_type_and_ends_nothing(env):
    with pytest.raises(OddError, match="number 4") as caught:
        env.fail()
    if isinstance(env, ParallelEnv):
        assert isinstance(caught.value.__cause__, WorkerError)
        assert "in fail" in caught.value.__cause__.remote_traceback
    assert env.double() == [8, 10, 12]
    env.rand_step(env.reset())


def test_what_cannot_travel_is_an_error_and_ends_nothing():
    with ParallelEnv(2, numbered, create_env_kwargs={"number": 1}) as env:
        with pytest.raises((TypeError, pickle.PicklingError)):
            _ = env.lock
        assert env.number == [1, 1]


def test_asking_a_closed_environment_says_so(env):
    env.close()
    with pytest.raises(ClosedError):
        _ = env.number
