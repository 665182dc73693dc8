"""The fast path is bitwise equal to PettingZoo, and used only where that is proven."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("pygame")

from pettingzoo.utils.conversions import aec_to_parallel
from same_steps import compare
from support.zoo import Script, ScriptedEnv, ScriptedTurns

from marl_collect.envs import PettingZooEnv, PettingZooWrapper, available_envs
from marl_collect.envs.pettingzoo import fast_path as pettingzoo_fast
from marl_collect.envs.pettingzoo.fast_path import PROVEN, world_of
from marl_collect.envs.pettingzoo.mpe_physics import Physics, patch
from marl_collect.envs.pettingzoo.tasks import find_task

RESULTS = Path(__file__).parents[2] / "scripts" / "equality.json"
RECORDS = json.loads(RESULTS.read_text())

PARTICLES = [t.removeprefix("mpe/") for t in available_envs() if t.startswith("mpe/")]

CASES: list[tuple[str, str, dict[str, Any], int]] = [
    # Five episodes or more of each task; scripts/equality.py compares 10,000 steps.
    *[("mpe2", task, {}, 125) for task in PARTICLES],
    *[("mpe2", task, {"continuous_actions": True}, 125) for task in PARTICLES],
    ("mpe2", "simple_spread_v3", {"terminate_on_success": True, "N": 2}, 500),
    ("Box2D", "multiwalker_v9", {}, 300),
    ("Box2D", "multiwalker_v9", {"terminate_on_fall": False}, 300),
    (
        "Box2D",
        "multiwalker_v9",
        {"terminate_on_fall": False, "remove_on_fall": False, "max_cycles": 40},
        250,
    ),
    ("Box2D", "multiwalker_v9", {"n_walkers": 1, "max_cycles": 20}, 100),
    ("pygame", "pursuit_v5", {"max_cycles": 30, "n_pursuers": 3, "n_evaders": 4}, 200),
    ("pygame", "knights_archers_zombies_v11", {"spawn_delay": 5}, 300),
    ("pygame", "rps_v2", {}, 150),
    ("pymunk", "pistonball_v6", {"n_pistons": 4, "max_cycles": 40}, 200),
    ("pygame", "cooperative_pong_v6", {"max_cycles": 40}, 200),
]


# cooperative_pong observes by rendering, and warns if no render_mode is set.
@pytest.mark.filterwarnings("ignore:.*calling render method:UserWarning")
@pytest.mark.parametrize(("package", "task", "keywords", "steps"), CASES)
def test_the_data_equal_those_of_pettingzoo(
    package: str, task: str, keywords: dict[str, Any], steps: int
) -> None:
    pytest.importorskip(package)
    stock, twin = find_task(task)(**keywords), find_task(task)(**keywords)
    world = world_of(twin)
    assert world is not None
    spaces = {agent: stock.action_space(agent) for agent in stock.possible_agents}
    tally = compare(stock, world, spaces, steps=steps, seed=0)
    assert tally["steps"] == steps
    stock.close()
    twin.close()


def test_only_proven_versions_take_the_fast_path(monkeypatch: Any) -> None:
    pytest.importorskip("mpe2")
    if _other_versions("simple_v3"):
        assert not PettingZooEnv("simple_v3").is_fast
        return
    assert PettingZooEnv("simple_v3").is_fast
    assert not PettingZooEnv("simple_v3", fast=False).is_fast
    monkeypatch.setattr(pettingzoo_fast, "version", lambda package: "99")
    assert not PettingZooEnv("simple_v3").is_fast


@pytest.mark.filterwarnings("ignore:The base environment .* `render_mode`")
@pytest.mark.parametrize("declares", [False, True])
def test_a_custom_environment_takes_the_stock_path(*, declares: bool) -> None:
    """Also one that renders nothing, as inside wrappers of SuperSuit."""
    raw = ScriptedTurns(Script())
    raw.metadata = {"name": "turns", "is_parallelizable": True}  # type: ignore[dict-item]
    if not declares:
        del raw.render_mode
    assert not PettingZooWrapper(aec_to_parallel(raw)).is_fast
    assert not PettingZooWrapper(ScriptedEnv()).is_fast


def test_a_wrapped_or_rendered_environment_takes_the_stock_path() -> None:
    pytest.importorskip("mpe2")
    from pettingzoo.utils.wrappers import BaseParallelWrapper

    stock = find_task("simple_v3")()
    assert not PettingZooWrapper(BaseParallelWrapper(stock)).is_fast
    stock.render_mode = "human"
    assert world_of(stock) is None


def test_every_version_in_proven_has_a_record() -> None:
    proven = {(r["module"], tuple(r["versions"])) for r in RECORDS}
    admitted = {(m, versions) for m, several in PROVEN.items() for versions in several}
    assert admitted <= proven
    for record in RECORDS:
        assert record["seeds"] >= 5
        assert record["found"]["steps"] >= 10_000
        assert record["found"]["episodes"] > 0


def test_the_records_include_deaths_and_truncations() -> None:
    tallies = {r["task"]: r["found"] for r in RECORDS}
    assert tallies["sisl/multiwalker_v9"]["deaths"] > 0
    assert tallies["sisl/multiwalker_v9"]["terminations"] > 0
    assert tallies["mpe/simple_spread_v3"]["truncations"] > 0
    # PettingZoo flags the limit of this one's frames as terminated.
    unflagged = {r["task"] for r in RECORDS if not r["found"]["truncations"]}
    assert unflagged == {"sisl/multiwalker_v9"}


def test_fast_physics_is_used_only_for_unmodified_worlds() -> None:
    pytest.importorskip("mpe2")
    from mpe2._mpe_utils.core import World

    own_env = find_task("simple_spread_v3")()
    world_of(own_env)
    assert own_env.unwrapped.world.step.__func__ is Physics.step

    class Windy(World):
        def integrate_state(self, p_force: Any) -> None:
            super().integrate_state(p_force)

    changed_env = find_task("simple_spread_v3")()
    changed_env.unwrapped.world.__class__ = Windy
    world_of(changed_env)
    assert changed_env.unwrapped.world.step.__func__ is World.step


@pytest.mark.parametrize(
    "change",
    [
        lambda world: setattr(world.agents[1], "u_noise", 0.3),
        lambda world: setattr(world.landmarks[0], "movable", True),
        lambda world: world.agents[0].state.p_pos.__setitem__(
            slice(None), world.agents[1].state.p_pos
        ),
        lambda world: setattr(world.agents[2], "max_speed", 0.05),
        lambda world: setattr(world.landmarks[1], "collide", True),
        lambda world: setattr(world.agents[0], "initial_mass", 3.0),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_fast_physics_equals_mpes_step_in_changed_worlds(change: Any) -> None:
    pytest.importorskip("mpe2")
    places = []
    for quick in (True, False):
        env = find_task("simple_spread_v3")()
        env.reset(seed=3)
        world = env.unwrapped.world
        change(world)
        if quick:
            patch(env.unwrapped)
        np.random.seed(0)  # noqa: NPY002 - the generator of mpe2's noise
        for agent in world.agents:
            agent.action.u = np.array([4.0, -1.0])
        for _ in range(5):
            world.step()
        entities = [*world.agents, *world.landmarks]
        place = np.array([entity.state.p_pos for entity in entities])
        place[np.isnan(place)] = np.nan  # IEEE 754 leaves their signs open.
        places.append(place.tobytes())
    assert places[0] == places[1]


def _other_versions(task: str) -> bool:
    """Whether the installed versions differ from the proven ones."""
    raw = pettingzoo_fast.raw_environment(find_task(task)())
    module = type(raw).__module__
    return pettingzoo_fast.installed_versions(module) not in PROVEN.get(module, ())
