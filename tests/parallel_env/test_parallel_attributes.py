"""Attributes and methods of the environments, as lists."""

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect.errors import ClosedError, WorkerError
from marl_collect.parallel_env import ParallelEnv, SerialEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


@pytest.fixture(params=[SerialEnv, ParallelEnv])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    options = {"num_processes": 2, "groups": 2} if request.param is ParallelEnv else {}
    kwargs = [{"number": k} for k in (4, 5, 6)]
    with request.param(3, numbered, create_env_kwargs=kwargs, **options) as env:
        yield env


def test_an_attribute_is_a_list_of_each_environments_value(env: Any) -> None:
    assert env.number == [4, 5, 6]
    assert env.engine().attribute("number") == [4, 5, 6]


def test_a_method_is_called_in_each_environment(env: Any) -> None:
    assert env.double() == [8, 10, 12]
    assert env.double(3, plus=1) == [13, 16, 19]


def test_an_unknown_name_is_an_attribute_error(env: Any) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = env.nonsense
    assert not hasattr(env, "nonsense")
    assert env.number == [4, 5, 6]


@pytest.mark.parametrize("name", ["_calls", "__deepcopy__", "_ipython_display_"])
def test_private_names_are_not_forwarded(env: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"Env has no attribute '{name}'"):
        getattr(env, name)


def test_an_error_in_a_method_is_raised_with_its_own_type_and_does_not_close_the_batch(
    env: Any,
) -> None:
    with pytest.raises(OddError, match="number 4") as excinfo:
        env.fail()
    if isinstance(env, ParallelEnv):
        assert isinstance(excinfo.value.__cause__, WorkerError)
        assert "in fail" in excinfo.value.__cause__.remote_traceback
    assert env.double() == [8, 10, 12]
    env.rand_step(env.reset())


def test_a_value_that_cannot_be_pickled_is_an_error_and_does_not_close_the_batch() -> (
    None
):
    factory: Any = numbered
    with ParallelEnv(2, factory, create_env_kwargs={"number": 1}) as env:
        with pytest.raises((TypeError, pickle.PicklingError)):
            _ = env.lock
        assert env.number == [1, 1]


def test_attributes_of_a_closed_environment_raise_an_error(env: Any) -> None:
    env.close()
    with pytest.raises(ClosedError):
        _ = env.number


def test_one_or_some_environments_can_be_selected(env: Any) -> None:
    assert env[1].number == 5
    assert env[-1].double(3) == 18
    assert env[0:2].number == [4, 5]
    assert env[[2, 0]].double(plus=1) == [13, 9]
    assert env[torch.tensor([1])].number == [5]
    assert env[torch.tensor(2)].number == 6
    assert len(env[1:]) == 2
    assert "environments [1]" in repr(env[1])


def test_a_view_shows_current_values(env: Any) -> None:
    view = env[1]
    env.reset()
    before = view.description
    env.rand_step()
    assert view.description == before
    assert view.number == 5


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "out of range"),
        ([0, 7], IndexError, "out of range"),
        ([True, False, True], TypeError, "nonzero"),
        (torch.tensor([True, False, True]), TypeError, "nonzero"),
        ("agents", TypeError, "an integer, a slice"),
    ],
)
def test_an_index_that_selects_no_environment_is_refused(
    env: Any, index: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _ = env[index]


def test_views_neither_step_nor_set_attributes(env: Any) -> None:
    view = env[1]
    for name in ("reset", "step", "bind", "reset_row"):
        with pytest.raises(AttributeError, match="_step"):
            getattr(view, name)
    with pytest.raises(AttributeError, match="cannot be set through a view"):
        view.number = 3
    with pytest.raises(TypeError, match="item assignment"):
        env[1] = 3
    with pytest.raises(AttributeError, match="nonsense"):
        _ = view.nonsense
    with pytest.raises(OddError, match="number 5"):
        view.fail()
