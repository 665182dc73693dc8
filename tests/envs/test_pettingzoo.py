"""PettingZoo parallel environments: how they are built, unusual agents, pictures."""

from typing import Any

import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, altered
from zoo_tools import BoundEnv, scripted

from marl_collect import Collector
from marl_collect.envs import PettingZooEnv, PettingZooWrapper


def test_an_agent_that_is_still_listed_after_its_end_is_alive_after_the_next_step() -> (
    None
):
    """This breaks PettingZoo's rules, but the environment's data are followed."""
    script = Script(ends={"agent_1": (1, "terminated")}, returns={"agent_1": 1})
    env = scripted(script, done_on_any=False)
    env.step()
    assert env.flags("agent")[0] == [False, True, False]
    env.step(agent=[0, 2, 0])
    assert env["agent", "mask"].all()
    assert env["agent", "observation"][1].tolist() == [1, 2, 2]
    assert env.flags("agent")[0] == [False] * 3


def test_agents_may_be_listed_in_any_order() -> None:
    raw: Any = ScriptedEnv()

    def turn(begun: Any) -> Any:
        raw.agents = raw.agents[::-1]
        return dict(reversed(begun[0].items())), begun[1]

    altered(raw, reset=turn)
    env = BoundEnv(PettingZooWrapper(raw))
    env.step(agent=[1, 2, 3])
    assert list(raw.received[0].items()) == [
        ("agent_2", 3),
        ("agent_1", 2),
        ("agent_0", 1),
    ]
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert not env["done"].any()


class Nobody(ScriptedEnv):  # type: ignore[misc]
    """Has no possible agents."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = []


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (
            PettingZooWrapper,
            {"env": ScriptedEnv(), "device": "cuda:0"},
            ValueError,
            "storing_device='cuda:0'",
        ),
        (
            PettingZooWrapper,
            {"env": ScriptedEnv},
            TypeError,
            r"lambda: PettingZooWrapper\(ScriptedEnv\(\)\)",
        ),
        (PettingZooWrapper, {"env": 3}, TypeError, "ParallelEnv or AECEnv, but got 3"),
        (PettingZooWrapper, {"env": Nobody()}, ValueError, "possible_agents"),
        (
            PettingZooEnv,
            {"task": ScriptedEnv},
            TypeError,
            r"name, .* lambda: PettingZooWrapper\(",
        ),
    ],
)
def test_what_is_no_environment_or_task_is_an_error_with_advice(
    make: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**arguments)


def test_without_use_mask_there_is_no_mask_and_agents_may_die() -> None:
    env = scripted(Script(ends={"agent_0": (1, "terminated")}), use_mask=False)
    assert ("agent", "mask") not in env.row
    env.step()
    assert env["done"].all()


def test_the_seed_argument_determines_episodes_outside_collectors() -> None:
    pytest.importorskip("Box2D")
    first, second, other = (
        PettingZooEnv("multiwalker_v9", seed=seed).reset()["walker", "observation"]
        for seed in (5, 5, 6)
    )
    assert bool((first == second).all())
    assert bool((first != other).any())
    assert PettingZooWrapper(ScriptedEnv(), seed=7).description.pinned_seed == 7


def test_render_returns_an_image_if_there_is_a_render_mode() -> None:
    env = PettingZooWrapper(ScriptedEnv(render_mode="rgb_array"))
    env.reset()
    image = env.render()
    assert image is not None
    assert image.shape == (4, 5, 3)
    assert PettingZooWrapper(ScriptedEnv()).render() is None


def test_close_may_be_called_twice() -> None:
    with PettingZooWrapper(ScriptedEnv(), device="cpu") as env:
        assert not env.is_closed
    env.close()
    assert env.is_closed


def test_the_task_may_be_a_module_and_a_callable() -> None:
    env = PettingZooEnv("workloads.free:FreeEnv", n_agents=2, size=5)
    assert env.group_map == {"agent": ["agent_0", "agent_1"]}
    assert env.observation_space["agent"]["observation"].shape == (2, 5)


def test_a_time_limit_is_in_the_description_and_at_least_one() -> None:
    env = PettingZooWrapper(ScriptedEnv(), time_limit=7)
    assert env.description.time_limit == 7
    with pytest.raises(ValueError, match="time_limit must be at least 1, but is 0"):
        PettingZooWrapper(ScriptedEnv(), time_limit=0)


def test_methods_and_attributes_of_the_environment_are_called_by_name() -> None:
    def make() -> PettingZooWrapper:
        raw: Any = ScriptedEnv()
        raw.set_wind = lambda wind: vars(raw).update(wind=wind)
        return PettingZooWrapper(raw)

    with Collector(make, frames_per_batch=4, seed=0) as collector:
        assert collector.call_env("set_wind", 3.0) == [None]
        assert collector.getattr_env("wind") == [3.0]
        with pytest.raises(AttributeError, match="set_sun"):
            collector.call_env("set_sun")
    env: Any = make()
    with pytest.raises(AttributeError, match="full_action_spec"):
        _ = env.full_action_spec
    env.close()
