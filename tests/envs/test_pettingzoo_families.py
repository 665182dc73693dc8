"""Tasks of every PettingZoo family pass ``check_env``."""

from typing import Any

import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("pygame")

from marl_collect.envs import PettingZooEnv
from marl_collect.testing.check_env import check_env

torch = pytest.importorskip("torch")

pytestmark = [
    # cooperative_pong observes by rendering, and warns if no render_mode is set.
    pytest.mark.filterwarnings("ignore:.*calling render method:UserWarning")
]

PARALLEL: list[tuple[str, str, dict[str, Any], int]] = [
    ("Box2D", "multiwalker_v9", {}, 60),
    ("Box2D", "multiwalker_v9", {"done_on_any": False, "terminate_on_fall": False}, 60),
    ("scipy", "pursuit_v5", {"n_pursuers": 3, "n_evaders": 3, "max_cycles": 9}, 10),
    ("pymunk", "pistonball_v6", {"n_pistons": 3, "max_cycles": 4}, 5),
    ("pygame", "cooperative_pong_v6", {"max_cycles": 4}, 5),
    ("pygame", "knights_archers_zombies_v11", {"spawn_delay": 3}, 40),
    ("pygame", "knights_archers_zombies_v11", {"done_on_any": False}, 40),
    ("pygame", "rps_v2", {}, 20),
    ("magent2", "battlefield_v5", {"done_on_any": False, "max_cycles": 9}, 10),
]


@pytest.mark.parametrize(("package", "task", "keywords", "steps"), PARALLEL)
def test_parallel_environments(
    package: str, task: str, keywords: dict[str, Any], steps: int
) -> None:
    pytest.importorskip(package)
    check_env(lambda: PettingZooEnv(task, **keywords), steps=steps, episodes=2)


@pytest.mark.parametrize(
    ("package", "task", "keywords"),
    [
        ("Box2D", "multiwalker_v9", {"terminate_on_fall": False}),
        ("scipy", "pursuit_v5", {"n_pursuers": 2, "n_evaders": 2, "max_cycles": 5}),
        ("mpe2", "simple_world_comm_v3", {}),
        ("pygame", "knights_archers_zombies_v11", {"spawn_delay": 3}),
        ("pygame", "rps_v2", {}),
        ("chess", "chess_v6", {}),
        ("pygame", "go_v5", {"board_size": 5}),
    ],
)
def test_turn_based_environments(
    package: str, task: str, keywords: dict[str, Any]
) -> None:
    pytest.importorskip(package)
    check_env(
        lambda: PettingZooEnv(task, parallel=False, **keywords), steps=30, episodes=2
    )


@pytest.mark.roms
def test_atari() -> None:
    check_env(lambda: PettingZooEnv("pong_v3", max_cycles=20), steps=25, episodes=1)


def test_a_missing_rom_is_an_error_that_names_the_installer() -> None:
    multi_agent_ale_py = pytest.importorskip("multi_agent_ale_py")
    try:
        PettingZooEnv("pong_v3").close()
    except OSError as error:
        assert "AutoROM" in str(error)  # noqa: PT017 - no error if ROMs are installed
    assert multi_agent_ale_py is not None


def test_a_state_that_is_not_callable_is_an_error() -> None:
    pytest.importorskip("pettingzoo.classic")
    with pytest.raises(ValueError, match=r"with state\(\), but that of rps_v2 raised"):
        PettingZooEnv("rps_v2", return_state=True)
