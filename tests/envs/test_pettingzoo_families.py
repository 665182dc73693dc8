"""Tasks of PettingZoo pass ``check_env``, or name what they need."""

from functools import partial
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


@pytest.mark.parametrize(
    ("package", "task", "parallel", "keywords"),
    [
        ("pymunk", "pistonball_v6", True, {"n_pistons": 3, "max_cycles": 4}),
        ("pygame", "cooperative_pong_v6", True, {"max_cycles": 4}),
        ("mpe2", "simple_world_comm_v3", False, {}),
        ("chess", "chess_v6", False, {}),
        ("pygame", "go_v5", False, {"board_size": 5}),
    ],
)
def test_environments_that_the_oracle_does_not_replay(
    package: str, task: str, parallel: bool, keywords: dict[str, Any]
) -> None:
    pytest.importorskip(package)
    factory = partial(PettingZooEnv, task, parallel, **keywords)
    check_env(factory, steps=30, episodes=2)


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
