"""Scenarios with bots, and substrates that the user built.

Bots need TensorFlow, so they run in processes of their own. The trained bots come from
an archive that may be missing; the no-op bot and policies with a fixed action do not.
"""

import importlib.util
import textwrap
from typing import Any

import numpy as np
import pytest
from support.internals import bound
from support.scripts import run_python

if None in map(importlib.util.find_spec, ("dmlab2d", "meltingpot")):
    pytest.skip("needs dm-meltingpot", allow_module_level=True)

from marl_collect.envs import MeltingpotEnv, MeltingpotWrapper
from marl_collect.envs.meltingpot.imports import meltingpot_modules
from marl_collect.testing.check_env import check_env

SMALL = "collaborative_cooking__cramped"


def build(name: str) -> Any:
    """Build a substrate with MeltingPot's function, without importing bots."""
    with meltingpot_modules():
        substrate = importlib.import_module("meltingpot.substrate")
        return substrate.build(name, roles=("default",) * 2)


def run(source: Any) -> None:
    """Run ``source`` in a process that may import TensorFlow."""
    out = run_python("-c", textwrap.dedent(source), timeout=500.0)
    assert out.returncode == 0, out.stderr[-3000:]


def test_a_built_substrate_has_the_same_keys_as_a_named_one() -> None:
    with (
        MeltingpotWrapper(env=build("coins"), world_rgb=True) as built,
        MeltingpotEnv("coins", world_rgb=True) as named_env,
    ):
        assert built.description.row() == named_env.description.row()
        assert built.description.time_limit == named_env.description.time_limit == 5000
        rollout = built.rollout(4)
        assert set(rollout.keys(True, True)) == set(
            named_env.fake_tensordict().keys(True, True)
        )
        assert np.array_equal(built.render(), rollout["next", "RGB"][-1].numpy())  # type: ignore[arg-type]
        assert built.render().shape == (136, 136, 3)


def test_check_env_passes() -> None:
    check_env(lambda: MeltingpotWrapper(env=build(SMALL)), episodes=1, steps=30)


def test_rows_hold_what_the_substrate_returns() -> None:
    env = build("coins")
    timesteps: list[Any] = []
    env.observables().timestep.subscribe(timesteps.append)
    groups = {"all": ["player_1", "player_0"]}
    with MeltingpotWrapper(env=env, group_map=groups) as wrapped:
        row = bound(wrapped)
        actions: list[Any] = []
        env.observables().action.subscribe(actions.append)
        rng = np.random.default_rng(0)
        for _ in range(100):
            row["all", "action"][...] = rng.integers(0, 7, 2)
            wrapped.step_row()
            for index, player in ((0, 1), (1, 0)):
                assert actions[-1][player] == row["all", "action"][index]
                assert row["all", "reward"][index, 0] == timesteps[-1].reward[player]
                for name, value in timesteps[-1].observation[player].items():
                    if name != "WORLD.RGB":
                        ours = row["all", "observation", name][index]
                        assert np.array_equal(ours, np.reshape(value, ours.shape))
        assert len(timesteps) == 101
        assert wrapped.reset_seconds > 0


def test_the_substrates_frame_limit_truncates_and_is_never_exceeded() -> None:
    with MeltingpotWrapper(env=build(SMALL), observations=["RGB"]) as env:
        row = bound(env)
        env.step_row()
        env.reset_row(0)  # The limit is one of frames since the reset.
        for step in range(1, 1001):
            env.step_row()
            assert row["done",][0] == (step == 1000)
        assert row["truncated",][0]
        assert row["agents", "truncated"].all()
        assert not row["terminated",][0]
        with pytest.raises(RuntimeError, match="call reset"):
            env.step_row()
        env.reset_row(1)
        assert not row["done",][0]


@pytest.mark.parametrize("wrong", ["coins", None, 3, MeltingpotEnv])
def test_anything_but_a_substrate_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="Expected a substrate or scenario"):
        MeltingpotWrapper(env=wrong)


def test_built_objects_do_not_know_their_roles() -> None:
    with pytest.raises(ValueError, match="no known roles"):
        MeltingpotWrapper(env=build(SMALL), group_map="role")  # type: ignore[arg-type]


imports_tensorflow = pytest.mark.timeout(600)

NOOP = """
def noop_scenario():
    from meltingpot import bot, scenario
    config = type(scenario.get_config("coins_0"))(
        description="",
        tags=frozenset(),
        substrate="coins",
        roles=("default",) * 2,
        is_focal=(True, False),
        bots_by_role={"default": frozenset({bot.NOOP_BOT_NAME})},
    )
    return scenario.build_from_config(config)
"""


@pytest.mark.processes
@imports_tensorflow
def test_scenarios_with_bots_that_need_no_archive() -> None:
    run(
        NOOP
        + """
import random
import numpy as np, pytest
from marl_collect.testing.check_env import check_env
from marl_collect.core.description import allocate
from marl_collect.envs import MeltingpotEnv, MeltingpotWrapper
from meltingpot import scenario, substrate
from meltingpot.utils.policies import fixed_action_policy
from meltingpot.utils.scenarios import scenario as scenarios

with MeltingpotWrapper(env=noop_scenario(), max_steps=6) as env:
    assert env.group_map == {"agents": ["player_0"]}
    names = set(env.description.groups["agents"].observation.spaces)
    assert names == {"COLLECTIVE_REWARD", "RGB"}
    assert env.description.time_limit == 6
    before = random.getstate()
    data = env.rollout(14, break_when_any_done=False)
    assert random.getstate() == before
    assert data["next", "truncated"].squeeze().nonzero().flatten().tolist() == [5, 11]
    assert data["next", "agents", "observation", "RGB"].shape == (14, 1, 88, 88, 3)
    assert env.render().shape == (136, 136, 3)
    assert len(env.events()) == 0
with pytest.raises(ValueError, match="no image of the whole world"):
    MeltingpotWrapper(env=noop_scenario(), world_rgb=True)

# A bot that always turns: the substrate gets its actions and those of the row.
built = scenarios.build_scenario(
    substrate=substrate.build("coins", roles=["default"] * 2),
    bots={"turner": fixed_action_policy.FixedActionPolicy(5)},
    bots_by_role={"default": {"turner"}},
    roles=("default",) * 2,
    is_focal=(False, True),
    permitted_observations=scenario.PERMITTED_OBSERVATIONS,
)
actions = []
built.observables().substrate.action.subscribe(actions.append)
with MeltingpotWrapper(env=built, observations=["RGB"]) as env:
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(0)
    for action in (1, 2, 3):
        row["agents", "action"][...] = action
        env.step_row()
    assert [list(both) for both in actions] == [[5, 1], [5, 2], [5, 3]]

# By name, if the archive is missing.
def missing(name):
    raise OSError("SavedModel file does not exist at: " + name)
scenario.build = missing
with pytest.raises(FileNotFoundError, match="install_meltingpot.py --force"):
    MeltingpotEnv("coins_0")
with pytest.raises(ValueError, match="Did you mean coins_"):
    MeltingpotEnv("coins_99")
"""
    )


@imports_tensorflow
@pytest.mark.bots
def test_a_scenario_by_name_runs_with_its_trained_bots() -> None:
    run(
        """
from marl_collect.envs import MeltingpotEnv

with MeltingpotEnv("coins_0", group_map="role") as env:
    assert env.description.name == "coins_0"
    assert env.group_map == {"agents": ["player_0"]}
    assert env.rollout(3)["next", "agents", "reward"].shape == (3, 1, 1)
"""
    )
