"""Lab2d: shipped levels, which are reproducible, and custom levels."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.internals import Around, bound, lab2d_world, names_read
from support.packages import skip_without

if importlib.util.find_spec("dmlab2d") is None:
    pytest.skip("needs the extra dmlab2d", allow_module_level=True)

from gymnasium import spaces

from marl_collect.core.description import allocate
from marl_collect.core.groups import MarlGroupMapType
from marl_collect.envs import Lab2dEnv, MeltingpotEnv
from marl_collect.errors import ClosedError
from marl_collect.testing.check_env import ContractError, check_env

SHIPPED: dict[str, Any] = {
    "commons_harvest": {"settings": {"numPlayers": 3}},
    "clean_up": {"settings": {"numPlayers": 2}},
    "running_with_scissors": {"settings": {"numPlayers": 2}},
    "pushbox": {"rebuild": True},  # WORLD.STEPS keeps its value across episodes
    "chase_eat": {},
    "examples/level_api": {},
}

DUEL = """
local random = require 'system.random'
local tensor = require 'system.tensor'
local api = {_moves = {0, 0}, _places = {0, 0}, _starts = 0}
function api:init(kwargs)
  self._goal = tonumber(kwargs.goal or '6')
  self._lone = kwargs.lone == 'true'
end
function api:observationSpec()
  local specs = {{name = 'GLOBAL.TEXT', type = 'String', shape = {0}},
                 {name = 'GLOBAL.STARTS', type = 'Int32s', shape = {}},
                 {name = '1.TRAIL', type = 'tensor.DoubleTensor', shape = {0}}}
  for i = 1, 2 do
    table.insert(specs, {name = i .. '.PLACE', type = 'Doubles', shape = {}})
    table.insert(specs, {name = i .. '.REWARD', type = 'Doubles', shape = {}})
  end
  table.insert(specs, {name = '2.EXTRA', type = 'Int32s', shape = {}})
  return specs
end
function api:observation(index)
  if index == 1 then return 'text' end
  if index == 2 then return self._starts end
  if index == 3 then return tensor.DoubleTensor{self._places[1]} end
  if index == 8 then return 7 end
  local player = index < 6 and 1 or 2
  local place = index % 2 == 0
  return place and self._places[player] or self._moves[player]
end
function api:discreteActionSpec()
  local specs = {{name = '1.move', min = -1, max = 1},
                 {name = '2.move', min = -1, max = 1}}
  if self._lone then table.insert(specs, {name = '2.jump', min = 0, max = 3}) end
  return specs
end
function api:discreteActions(actions) self._moves = {actions[1], actions[2]} end
function api:start(episode, seed)
  random:seed(seed)
  self._starts = self._starts + 1
  self._places = {random:uniformInt(0, 1000) / 1000, 0}
end
function api:advance(steps)
  for i = 1, 2 do self._places[i] = self._places[i] + self._moves[i] end
  return self._places[2] < self._goal, nil
end
return api
"""


@pytest.fixture
def duel(tmp_path: Path) -> Any:
    """Settings of a custom level with two players."""
    level = tmp_path / "duel"
    level.mkdir()
    (level / "init.lua").write_text(DUEL)
    return {"levelDirectory": str(tmp_path)}


@pytest.fixture(params=["lab2d", "meltingpot"])
def make(request: Any, duel: Any) -> Any:
    """Build an environment of two players with one action."""
    if request.param == "lab2d":
        return partial(Lab2dEnv, "duel", duel)
    skip_without("meltingpot", "needs the extra meltingpot")
    return partial(MeltingpotEnv, "collaborative_cooking__cramped")


@pytest.mark.parametrize("level", SHIPPED)
def test_a_shipped_level_repeats_its_episodes(level: str) -> None:
    def factory() -> Any:
        return Lab2dEnv(level, **SHIPPED[level])

    check_env(factory, steps=40)
    with factory() as env:
        assert env.description.repeats
        first, other = env.reset(seed=11), env.reset(seed=12)
        # Not all levels draw where players begin, and examples/level_api draws nothing.
        drawn = level in ("commons_harvest", "clean_up", "running_with_scissors")
        assert not drawn or (first != other).any()


def test_check_env_finds_a_level_that_keeps_state() -> None:
    with pytest.raises(ContractError, match=r"WORLD\.STEPS"):
        check_env(lambda: Lab2dEnv("pushbox"))


@pytest.mark.parametrize("status", ["TERMINATED", "INTERRUPTED"])
def test_an_interrupted_episode_is_truncated(status: str, duel: Any) -> None:
    """Levels in Lua cannot interrupt; a level in C++ can."""
    import dmlab2d

    class Ends(Around):
        def advance(self) -> Any:
            self._lab.advance()
            return getattr(dmlab2d, status), None

    with Lab2dEnv("duel", duel) as env:
        row = bound(env)
        Ends(env)
        env.step_row()
        interrupted = status == "INTERRUPTED"
        for key in (), ("agents",):
            assert row[*key, "done"].all()
            assert (row[*key, "truncated"] == interrupted).all()
            assert (row[*key, "terminated"] != interrupted).all()
        with pytest.raises(RuntimeError, match="call reset"):
            env.step_row()


def test_only_requested_observations_are_computed(make: Any) -> None:
    seen = "PLACE" if make.func is Lab2dEnv else "RGB"
    with make(observations=[seen]) as env:
        bound(env)
        requested = names_read(env)
        env.step_row()
    names = {f"{player}.{name}" for player in (1, 2) for name in (seen, "REWARD")}
    assert set(requested) == names


@pytest.mark.parametrize("wrong", [-1, "highest and one", 2**40])
def test_an_action_out_of_range_is_not_sent_to_lab2d(make: Any, wrong: Any) -> None:
    with make() as env:
        if isinstance(wrong, str):
            wrong = env.description.groups["agents"].n_actions
        row = bound(env)
        row["agents", "action"][...] = [1, wrong]
        with pytest.raises(ValueError, match="of agent 'player_1' is out of range"):
            env.step_row()
        row["agents", "action"][...] = 1
        env.step_row()
        assert lab2d_world(env).frames == 1


def test_use_before_a_reset_and_after_close_is_an_error(make: Any) -> None:
    env = make()
    env.bind(allocate(env.description.row()))
    assert env.render() is None
    assert make.func is Lab2dEnv or list(env.events()) == []
    with pytest.raises(RuntimeError, match="call reset"):
        env.step_row()
    env.close()
    env.close()
    assert env.is_closed
    assert env.render() is None
    uses = [env.reset, lambda: env.reset_row(0)]
    if make.func is Lab2dEnv:
        uses.append(lambda: env.read_property("settings.goal"))
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_observations_of_no_player_are_at_the_root() -> None:
    names = ["RGB", "POSITION", "WORLD.RGB"]
    with Lab2dEnv("commons_harvest", {"numPlayers": 2}, observations=names) as env:
        rollout = env.rollout(3)
        assert rollout["WORLD.RGB"].shape == (3, 208, 224, 3)
        assert rollout["next", "agents", "observation", "POSITION"].shape == (3, 2, 2)
        image = env.render()
        assert np.array_equal(image, rollout["next", "WORLD.RGB"][-1].numpy())  # type: ignore[arg-type]


def test_the_default_is_all_numeric_observations_of_the_players(duel: Any) -> None:
    with Lab2dEnv("commons_harvest") as env:
        observation = env.description.groups["agents"].observation
        assert set(observation.spaces) == {"RGB", "LAYER", "POSITION"}  # type: ignore[attr-defined]
        assert not env.description.root
    groups = {"left": ["player_0"], "right": ["player_1"]}
    with Lab2dEnv("duel", duel, group_map=groups) as env:
        described = env.description.groups
        assert set(described["left"].observation.spaces) == {"PLACE"}  # type: ignore[attr-defined]
        assert set(described["right"].observation.spaces) == {"EXTRA", "PLACE"}  # type: ignore[attr-defined]
        rollout = env.rollout(2)
        assert rollout["right", "observation", "EXTRA"].tolist() == [[[7]], [[7]]]


def test_a_level_without_player_prefixes_has_one_agent() -> None:
    with Lab2dEnv("pushbox", observations=["WORLD.RGB"]) as env:
        assert env.group_map == {"agents": ["player_0"]}
        assert env.description.groups["agents"].action == spaces.Discrete(5)
        rollout = env.rollout(3)
        assert rollout["agents", "observation", "WORLD.RGB"].shape == (3, 1, 80, 80, 3)
        # The level's single reward is the cost of a step.
        assert rollout["next", "agents", "reward"].squeeze().tolist() != [0, 0, 0]


def test_actions_may_be_one_hot(duel: Any) -> None:
    with Lab2dEnv("duel", duel, categorical_actions=False) as env:
        row = bound(env)
        assert row["agents", "action"].shape == (2, 3)
        row["agents", "action"][...] = [[1, 0, 0], [0, 0, 1]]
        env.step_row()
        assert row["agents", "reward"].reshape(-1).tolist() == [-1, 1]
        row["agents", "action"][...] = [[1, 0, 0], [0, 1, 1]]
        with pytest.raises(ValueError, match="player_1 in agents/action is not one-h"):
            env.step_row()
        assert lab2d_world(env).frames == 1


def test_multi_discrete_actions_are_never_one_hot() -> None:
    settings = {"numPlayers": 2}
    with Lab2dEnv("commons_harvest", settings, categorical_actions=False) as env:
        assert isinstance(env.description.groups["agents"].action, spaces.MultiDiscrete)
        assert env.rollout(3)["agents", "action"].shape == (3, 2, 3)


def test_an_action_table_combines_several_actions() -> None:
    table = [{"move": 0, "turn": 0, "zap": 0}, {"move": 1, "turn": -1, "zap": 1}]
    with Lab2dEnv("commons_harvest", {"numPlayers": 2}, actions=table) as env:
        assert env.description.groups["agents"].action == spaces.Discrete(2)
        row = bound(env)
        row["agents", "action"][...] = [1, 0]
        env.step_row()
        world = lab2d_world(env)
        action_values = {n: world.discrete[i] for n, i in world.discrete_index.items()}
        assert action_values["1.turn"] == -1
        assert action_values["1.zap"] == 1
        assert action_values["2.move"] == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([{"jump": 1}], "no action '1.jump'"),
        ([{"move": 9}], "only integers from 0 to 4"),
        ([{"move": 0.5}], "only integers from 0 to 4"),
        ([{"move": 1}, {"turn": 1}], "must set the same actions"),
        ([], "must set the same actions"),
        *((table, "must be a list of mappings") for table in ({0: 1}, [[1]], "move")),
    ],
)
def test_tables_that_do_not_fit_the_level_fail(table: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Lab2dEnv("commons_harvest", actions=table)


def test_continuous_actions_are_clipped_and_nan_is_an_error() -> None:
    with Lab2dEnv("examples/level_api", {"steps": 5}) as env:
        action = env.description.groups["agents"].action
        assert set(action.spaces) == {"continuous", "discrete"}  # type: ignore[attr-defined]
        row = bound(env)
        row["agents", "action", "discrete"][...] = 4
        row["agents", "action", "continuous"][...] = 50.0
        env.step_row()
        observation = row["agents", "observation", "VIEW3"]
        assert observation.tolist() == [
            [6, 7, 8]
        ]  # the level adds the action, at most 5
        assert row["agents", "reward"].tolist() == [[4.0]]
        row["agents", "action", "continuous"][...] = np.nan
        with pytest.raises(ValueError, match="'player_0' contains NaN"):
            env.step_row()


@pytest.mark.parametrize("name", ["rebuild", "categorical_actions"])
def test_switches_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, but is 'no'"):
        Lab2dEnv("pushbox", **{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limit", [{"settings": {"episodeLengthFrames": 4}}, {"max_steps": 4}], ids="".join
)
def test_limits_truncate(limit: dict[str, Any]) -> None:
    with Lab2dEnv("pushbox", **limit) as env:
        assert env.description.time_limit == 4
        data = env.rollout(10, break_when_any_done=False)["next"]
        ends = data["truncated"].squeeze().nonzero().flatten().tolist()
        assert ends == [3, 7]
        assert data["agents", "truncated"][ends].all()
        assert not data["terminated"].any()
        assert env.reset_seconds > 0


def test_a_level_restarts_in_place_or_is_rebuilt_on_request(duel: Any) -> None:
    counts = {}
    for rebuild in (False, True):
        options: Any = {"observations": ["PLACE", "GLOBAL.STARTS"], "rebuild": rebuild}
        with Lab2dEnv("duel", duel, **options) as env:
            row = allocate(env.description.row())
            env.bind(row)
            for seed in range(3):
                env.reset_row(seed)
                row["agents", "action"][...] = [1, 2]
                env.step_row()
                assert row["agents", "reward"][1] == 1
            counts[rebuild] = int(row["GLOBAL.STARTS",][0])
    assert counts == {False: 3, True: 1}


@pytest.mark.parametrize("own", [{}, {"env_seed": 7}])
def test_every_build_has_its_seed_or_that_of_the_settings(own: Any) -> None:
    skip_without("meltingpot", "needs the extra meltingpot")
    from marl_collect.envs.meltingpot.settings import read_substrate

    _, settings = read_substrate("coins", None, "ERROR")
    level: dict[str, Any] = {**settings.lab2d, **own}
    with Lab2dEnv(level.pop("levelName"), level, rebuild=True) as env:
        seeds = set()
        for _ in range(3):
            env.reset()
            seeds.add(env.read_property("settings.env_seed"))
    assert seeds == {"7"} if own else len(seeds) == 3


def test_events_and_properties_are_accessible() -> None:
    with Lab2dEnv("commons_harvest", {"numPlayers": 2}) as env:
        assert env.read_property("settings.numPlayers") == "2"
        assert "settings" in dict(env.list_property())
        env.write_property("settings.simulation.seedRadius", "4")
        assert env.read_property("settings.simulation.seedRadius") == "4"
        with pytest.raises(KeyError):
            env.read_property("nothing")
    with Lab2dEnv("examples/level_api", {"steps": 5}) as env:
        env.reset()
        assert [name for name, _ in env.events()] == ["start"]


def test_settings_may_be_nested_and_an_unknown_one_is_an_error() -> None:
    nested = {"simulation": {"seedRadius": 2}}
    with Lab2dEnv("commons_harvest", nested) as env:
        assert env.read_property("settings.simulation.seedRadius") == "2"
    with pytest.raises(ValueError, match="seedRadiux"):
        Lab2dEnv("commons_harvest", {"simulation": {"seedRadiux": 2}})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["RGBX"], "no observation 'RGBX'"),
        (["PLACE", "GLOBAL.TEXT"], "Only numbers of a fixed shape"),
        (["TRAIL"], "Only numbers of a fixed shape"),
        (["GLOBAL.STARTS"], "must have at least one observation"),
        (["PLACE", "EXTRA"], r"missing: \['EXTRA'\]"),
        (["PLACE", "1.PLACE"], r"missing: \['1.PLACE'\]"),
    ],
)
def test_unavailable_observations_are_named(
    duel: Any, names: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Lab2dEnv("duel", duel, observations=names)


def test_players_with_different_actions_need_different_groups(duel: Any) -> None:
    with pytest.raises(ValueError, match="player_1 of group 'agents'"):
        Lab2dEnv("duel", duel | {"lone": "true"})
    group_map = MarlGroupMapType.ONE_GROUP_PER_AGENT
    with Lab2dEnv("duel", duel | {"lone": "true"}, group_map=group_map) as env:
        groups = env.description.groups
        assert groups["player_0"].action == spaces.Discrete(3)
        assert groups["player_1"].action == spaces.MultiDiscrete([4, 3])
        env.rollout(3)
