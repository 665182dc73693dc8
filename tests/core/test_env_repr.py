"""``repr`` of environments: name, groups, number of environments."""

from typing import Any

import pytest
from workloads.counting import CountingEnv

from marl_collect import ParallelEnv, SerialEnv


def test_repr_has_the_name_and_the_groups() -> None:
    env = CountingEnv()
    name = env.description.name
    groups = ", ".join(f"{g} x {o.n_agents}" for g, o in env.description.groups.items())
    assert "hunter x 2" in groups
    assert repr(env) == f'CountingEnv("{name}": {groups})'
    env.close()
    assert repr(env) == f'CountingEnv("{name}": {groups}, closed)'


@pytest.mark.processes
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_repr_of_a_batch_has_the_number_of_environments(kind: Any) -> None:
    env_text = repr(CountingEnv()).removeprefix("CountingEnv(").removesuffix(")")
    with kind(3, CountingEnv) as env:
        assert repr(env) == f"{kind.__name__}(3 x {env_text})"
    assert repr(env) == f"{kind.__name__}(3 x {env_text}, closed)"


@pytest.mark.parametrize("kind", [CountingEnv, SerialEnv, ParallelEnv])
def test_an_environment_that_was_not_built_has_a_repr(kind: Any) -> None:
    assert repr(object.__new__(kind)) == f"{kind.__name__}(not started)"


def test_repr_of_a_pettingzoo_environment_has_its_task() -> None:
    pytest.importorskip("pettingzoo.sisl.multiwalker_v9")
    from marl_collect.envs import PettingZooEnv

    with PettingZooEnv("multiwalker_v9") as env:
        assert repr(env) == 'PettingZooEnv("multiwalker_v9": walker x 3)'
