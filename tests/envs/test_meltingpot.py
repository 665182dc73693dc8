"""MeltingPot's substrates, stepped without its wrappers or as users built them.

Most tests use small substrates, because large ones take seconds to reset. Bots need
TensorFlow, so they run in processes of their own. The trained bots come from an archive
that may be missing; the no-op bot and policies with a fixed action do not.
"""

import contextlib
import copy
import importlib.util
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

if None in map(importlib.util.find_spec, ("dmlab2d", "meltingpot")):
    pytest.skip("needs dm-meltingpot", allow_module_level=True)

from support.internals import Around, bound, lab2d_world
from support.scripts import run_python

from marl_collect.core.description import allocate
from marl_collect.envs import Lab2dEnv, MeltingpotEnv, MeltingpotWrapper
from marl_collect.envs.lab2d.world import Lab2dWorld
from marl_collect.envs.meltingpot import imports as meltingpot_imports
from marl_collect.envs.meltingpot.imports import meltingpot_modules
from marl_collect.testing.check_env import check_env

SMALL = "collaborative_cooking__cramped"


def test_every_substrate_is_described_without_being_built() -> None:
    names = MeltingpotEnv.available_envs()
    assert len(names) == 49
    for name in names:
        with MeltingpotEnv(name, world_rgb=True, group_map="role") as env:
            assert lab2d_world(env)._lab is None
            described = env.description
            roles = {a for group in described.groups.values() for a in group.agents}
            assert len(roles) == env._world.spec.n_players >= 2
            assert described.time_limit in {1000, 2000, 2400, 2500, 3000, 5000}
            assert not described.repeats
            for group in described.groups.values():
                assert {"RGB", "COLLECTIVE_REWARD"} <= set(group.observation.spaces)  # type: ignore[attr-defined]
                assert group.n_actions >= 7
            assert described.root["RGB"].shape[-1] == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("coins", {"world_rgb": True}),
        (SMALL, {"max_steps": 9, "truncate_without_reset": True}),
        (
            "prisoners_dilemma_in_the_matrix__repeated",
            {"group_map": "role", "categorical_actions": False},
        ),
    ],
)
def test_check_env_passes(name: str, options: Any) -> None:
    # Episodes are not repeated, and starting them takes most of the time.
    check_env(lambda: MeltingpotEnv(name, **options), episodes=1, steps=30)


def test_a_random_end_is_terminated() -> None:
    certain = dict(
        component="StochasticIntervalEpisodeEnding",
        kwargs=dict(
            minimumFramesPerEpisode=5,
            intervalLength=10,
            probabilityTerminationPerInterval=1.0,
        ),
    )

    def end_early(settings: Any) -> None:
        for component in settings["simulation"]["scene"]["components"]:
            if component["component"] == certain["component"]:
                component["kwargs"] = certain["kwargs"]
                return
        raise AssertionError("coins has no StochasticIntervalEpisodeEnding")

    with MeltingpotEnv(_config("coins", change=end_early)) as env:
        rollout = env.rollout(100)
        assert 5 <= rollout.shape[0] < 30
        assert rollout["next", "terminated"][-1].all()
        assert not rollout["next", "truncated"].any()
        assert rollout["next", "agents", "terminated"][-1].all()


def _config(name: str, change: Any = None, **settings: Any) -> Any:
    """Return a substrate's configuration with changed settings."""
    with meltingpot_modules():
        from meltingpot.configs import substrates as configs

        config = configs.get_config(name)
    build = config.lab2d_settings_builder

    def builder(*, config: Any, roles: Any) -> Any:
        # Parts of the settings belong to MeltingPot's modules and are used elsewhere.
        built = copy.deepcopy(build(config=config, roles=roles))
        built.update(settings)
        if change is not None:
            change(built)
        return built

    with config.unlocked():
        config.lab2d_settings_builder = builder
    return config


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the seeds with which Lab2d is built."""
    seeds: list[int] = []
    build = Lab2dWorld.build

    def counted(world: Lab2dWorld, seed: int) -> Any:
        seeds.append(seed)
        return build(world, seed)

    monkeypatch.setattr(Lab2dWorld, "build", counted)
    return seeds


def test_max_steps_truncates_and_then_lab2d_is_new(builds: list[int]) -> None:
    with MeltingpotEnv(SMALL, max_steps=5, observations=["RGB"]) as env:
        row = allocate(env.description.row())
        env.bind(row)
        assert env.reset_seconds == 0
        for seed in range(3):
            env.reset_row(seed)
            assert not row["done",][0]
            for step in range(1, 6):
                env.step_row()
                assert row["truncated",][0] == (step == 5)
            assert row["agents", "done"].all()
            assert not row["terminated",][0]
        assert builds == [0, 1, 2]
        assert env.reset_seconds > 0


def test_truncate_without_reset_continues_the_episode(builds: list[int]) -> None:
    config = _config(SMALL, maxEpisodeLengthFrames=12)
    with MeltingpotEnv(config, max_steps=5, truncate_without_reset=True) as env:
        row = bound(env)
        world = lab2d_world(env)
        lab = world.lab
        rng = np.random.default_rng(0)
        lengths: list[int] = []
        while len(lengths) < 4:
            length = 0
            while not row["done",][0]:
                row["agents", "action"][...] = rng.integers(0, 8, 2)
                env.step_row()
                length += 1
            assert row["truncated",][0]
            lengths.append(length)
            last = {key: array.copy() for key, array in row.items() if "RGB" in key}
            env.reset_row(0)
            assert not row["done",][0]
            if len(lengths) < 3:
                # The episode continues: same Lab2d and same observations.
                assert world.lab is lab
                assert all(np.array_equal(row[key], last[key]) for key in last)
        # The substrate's episode has 12 frames, 5 + 5 + 2; then a new one begins.
        assert lengths == [5, 5, 2, 5]
        assert world.lab is not lab
        assert len(builds) == 2


def test_a_reset_in_an_episode_continues_it() -> None:
    with MeltingpotEnv(SMALL, truncate_without_reset=True) as env:
        row = bound(env)
        for frames in range(1, 4):
            env.step_row()
            env.reset_row(9)
            assert lab2d_world(env).frames == frames
            assert not row["done",][0]


def test_group_maps_may_be_none_or_a_name_and_another_type_is_an_error() -> None:
    with MeltingpotEnv("coins", group_map=None) as env:
        assert env.group_map == {"agents": ["player_0", "player_1"]}
    with MeltingpotEnv("coins", group_map="one_group_per_agent") as env:
        assert list(env.group_map) == ["player_0", "player_1"]
    with pytest.raises(TypeError, match="group_map must be a mapping .* is 3 of type"):
        MeltingpotEnv("coins", group_map=3)  # type: ignore[arg-type]


def test_predators_and_prey_are_groups_by_role() -> None:
    roles = ["prey", "predator", "prey"]
    name = "predator_prey__open"
    with MeltingpotEnv(name, roles=roles, group_map="role") as env:
        groups = {"prey": ["player_0", "player_2"], "predator": ["player_1"]}
        assert env.group_map == groups
        rollout = env.rollout(5)
        assert rollout["prey", "observation", "STAMINA"].shape == (5, 2, 1)
        seen = rollout["next", "predator", "observation", "RGB"]
        assert seen.shape == (5, 1, 88, 88, 3)
    with MeltingpotEnv(name, group_map="role") as env:
        sizes = {group: len(agents) for group, agents in env.group_map.items()}
        assert sizes == {"predator": 3, "prey": 10}
    with MeltingpotEnv("coins", group_map="role") as env:
        assert list(env.group_map) == ["agents"]


def test_shapes_follow_the_number_of_players(monkeypatch: pytest.MonkeyPatch) -> None:
    # It can be built with six players, although its own code then fails to start.
    roles = ["impostor"] + ["crewmate"] * 5
    with MeltingpotEnv("hidden_agenda", roles=roles, observations=["VOTING"]) as env:
        observation = env.description.groups["agents"].observation
        assert observation["VOTING"].shape == (6, 8)
    # Its actions let each player vote against any of five.
    built: list[bool] = []
    close = lambda world: built.append(world._lab is not None)  # noqa: E731
    monkeypatch.setattr(Lab2dWorld, "close", close)
    with pytest.raises(ValueError, match=r"1\.vote .* only integers from 0 to 4"):
        MeltingpotEnv("hidden_agenda", roles=["impostor", "crewmate", "crewmate"])
    assert built == [True]  # The error closes what was built.
    with pytest.raises(ValueError, match="RGBX"):
        MeltingpotEnv("coins", observations=["RGBX"])
    with pytest.raises(ValueError, match="RGBX"):
        Lab2dEnv("pushbox", observations=["RGBX"])
    assert built == [True, False, True]


def test_a_level_that_contradicts_its_configuration_is_an_error() -> None:
    config = _config("coins")
    with meltingpot_modules(), config.unlocked():
        from meltingpot.utils.substrates import specs

        name = "MISMATCHED_COIN_COLLECTED_BY_PARTNER"
        observation_specs = {"RGB": specs.OBSERVATION["RGB"], name: specs.float64(3)}
        config.timestep_spec = specs.timestep(observation_specs)
    with (
        MeltingpotEnv(config) as env,
        pytest.raises(ValueError, match=f"coins: .*1.{name} the shape .3,., but"),
    ):
        bound(env)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"substrate": "coin"}, "Did you mean coins"),
        ({"substrate": "coins", "roles": ["miser"]}, "roles must contain .*default"),
        ({"substrate": "coins", "roles": []}, "roles must contain a role for each"),
        (
            {"substrate": "coins", "roles": ["default"] * 3},
            "does not support 3 players: by default it has 2",
        ),
        (
            {"substrate": "commons_harvest__open", "roles": ["default"] * 40},
            "does not support 40 players: by default it has 7",
        ),
        ({"substrate": "coins", "observations": ["RGBX"]}, r"unknown: \['RGBX'\]"),
        ({"substrate": "coins", "observations": ["WORLD.RGB"]}, "world_rgb=True"),
        ({"substrate": "coins", "observations": []}, "at least one observation"),
        ({"substrate": "coins", "max_steps": 0}, "at least 1"),
        ({"substrate": "coins", "group_map": "roles"}, "one of .'role', 'all_in_one"),
        ({"substrate": "coins", "group_map": {"a": ["player_0"]}}, "missing"),
        (
            {
                "substrate": "coins",
                "world_rgb": True,
                "group_map": {"RGB": ["player_0", "player_1"]},
            },
            "coins has a group and an observation at the root named 'RGB': rename one",
        ),
    ],
)
def test_unknown_names_are_errors(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeltingpotEnv(**arguments)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("observations", "RGB", r"\['RGB'\]"),
        ("max_steps", 2.5, "max_steps must be an integer"),
        ("world_rgb", "no", "world_rgb must be True or False, but is 'no'"),
    ],
)
def test_values_of_another_type_are_errors(name: str, wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MeltingpotEnv("coins", **{name: wrong})


@pytest.mark.parametrize("group_map", ["role", {"a": ["player_1"], "b": ["player_0"]}])
def test_rewards_of_an_episode_are_summed(group_map: Any) -> None:
    class Pays(Around):
        def observation(self, name: str) -> Any:
            if name.endswith(".REWARD"):
                return int(name[0]) / 2
            return self._lab.observation(name)

    options: Any = {"max_steps": 3, "truncate_without_reset": True}
    env = MeltingpotEnv("coins", group_map=group_map, episode_reward=True, **options)
    row = bound(env)
    Pays(env)  # Each player always gets half of its number.
    for steps in (1, 2, 3, 1, 2):
        if row["done",][0]:
            env.reset_row(0)
        env.step_row()
        for group, agents in env.group_map.items():
            sums = row[group, "episode_reward"]
            assert sums.dtype == np.float32
            pay = [(int(agent[-1]) + 1) / 2 for agent in agents]
            assert sums.ravel().tolist() == [steps * paid for paid in pay]
    env.close()


def test_lua_warns_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    for options, talks in (({}, False), ({"log_level": "WARN"}, True)):
        with contextlib.closing(MeltingpotEnv(SMALL, **options)) as env:  # type: ignore[arg-type]
            bound(env)
        captured = capfd.readouterr()
        assert ("base_simulation.lua" in captured.out) == talks
    with pytest.raises(ValueError, match="log_level must be one of"):
        MeltingpotEnv(SMALL, log_level="quiet")  # type: ignore[arg-type]


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
    assert list(built.events()) == list(named_env.events()) == []


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
from marl_collect.envs import Lab2dEnv, MeltingpotEnv, MeltingpotWrapper
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


def run_bare(source: str) -> None:
    """Run ``source`` in a fresh interpreter, because imports are what is tested."""
    out = run_python("-c", textwrap.dedent(source), interpreter=True, timeout=500.0)
    assert out.returncode == 0, out.stderr[-3000:]


PLAY = """
from marl_collect.core.description import allocate
from marl_collect.envs import MeltingpotEnv
def play():
    env = MeltingpotEnv("collaborative_cooking__cramped", observations=["RGB"])
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(1)
    env.step_row()
    assert row["agents", "observation", "RGB"].any()
    env.close()
"""


@pytest.mark.processes
@imports_tensorflow
def test_a_substrate_loads_no_tensorflow_and_a_later_import_is_complete() -> None:
    run_bare(
        PLAY
        + """
import importlib.util, sys, tempfile
play()
def loaded(*packages):
    return sorted(m for m in sys.modules if m.partition(".")[0] in packages)
assert not loaded("tensorflow", "jax", "chex", "meltingpot", "pandas", "torch")
play()
assert not loaded("meltingpot")

import meltingpot
assert meltingpot.__file__ and meltingpot.__spec__.loader
for name in ("bot", "scenario", "substrate"):
    assert getattr(meltingpot, name).__name__ == "meltingpot." + name
assert sys.modules["meltingpot.python"] is meltingpot
import meltingpot.configs.substrates.coins
import meltingpot.utils.substrates.builder as builder
assert builder is sys.modules["meltingpot.utils.substrates.builder"]
assert builder is meltingpot.utils.substrates.builder
roles = ("default",) * 2
env = meltingpot.substrate.build("collaborative_cooking__cramped", roles=roles)
assert type(env) is meltingpot.utils.substrates.substrate.Substrate
env.reset()
env.close()
whole = loaded("meltingpot")

import tensorflow as tf
assert tf.__file__
assert int(tf.constant(1) + 1) == 2
if importlib.util.find_spec("tensorboard"):
    from torch.utils.tensorboard import SummaryWriter
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("a", 1.0, 0)
play()
assert loaded("meltingpot") == whole
assert sys.modules["meltingpot"] is meltingpot
"""
    )


@pytest.mark.processes
@imports_tensorflow
def test_an_error_inside_leaves_no_modules_behind() -> None:
    run_bare(
        """
import sys
from marl_collect.envs.meltingpot import imports as meltingpot_imports
try:
    with meltingpot_imports.meltingpot_modules():
        from meltingpot.configs import substrates
        raise KeyError
except KeyError:
    pass
assert not [name for name in sys.modules if name.startswith("meltingpot")]
first = substrates
with meltingpot_imports.meltingpot_modules():
    with meltingpot_imports.meltingpot_modules():
        from meltingpot.configs import substrates
    from meltingpot.utils.substrates import builder
assert substrates is first
assert not [name for name in sys.modules if name.startswith("meltingpot")]
"""
    )


def test_without_meltingpot_errors_have_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "meltingpot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for use in (
        meltingpot_imports.import_meltingpot,
        meltingpot_imports.meltingpot_modules().__enter__,
    ):
        with pytest.raises(ImportError) as error:
            use()
        assert "marl-collect[meltingpot]" in str(error.value)
        assert "scripts/install_meltingpot.py" in str(error.value)
