"""An environment is described without being built in this process."""

import os

import pytest

from marl_collect.parallel_env.describe import describe
from marl_collect.testing.counting import CountingEnv, CountingError, Fault


def test_description_comes_from_another_process() -> None:
    here = os.getpid()

    def make() -> CountingEnv:
        assert os.getpid() != here
        return CountingEnv(n_prey=4)

    found = describe(make)
    assert found.group_map["prey"] == [f"prey_{i}" for i in range(4)]
    assert found.row() == CountingEnv(n_prey=4).description.row()


def test_an_error_of_the_factory_is_raised_unchanged() -> None:
    with pytest.raises(CountingError):
        describe(lambda: CountingEnv(fault=Fault("raise", "create")))


def test_instance_is_refused() -> None:
    with pytest.raises(TypeError, match="lambda"):
        describe(CountingEnv())  # type: ignore[arg-type]
