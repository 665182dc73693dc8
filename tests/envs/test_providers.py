"""Each family finds its tasks by name; the command line merges the families."""

from pathlib import Path

import pytest

from marl_collect.cli import tasks
from marl_collect.core.task_providers import GROUP
from marl_collect.envs.errors import UnknownTaskError
from marl_collect.envs.lab2d import provider as lab2d
from marl_collect.envs.meltingpot import provider as meltingpot
from marl_collect.envs.pettingzoo import provider as pettingzoo

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the entry points of pyproject.toml, whatever is installed here."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"][GROUP]
    info = tmp_path / "marl_collect-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: marl-collect\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


def test_pettingzoo_tasks_are_found_with_and_without_their_family():
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    assert pettingzoo.available_tasks()["sisl/multiwalker_v9"] == ""
    for name in ("multiwalker_v9", "sisl/multiwalker_v9"):
        assert pettingzoo.find_task(name).args == ("sisl/multiwalker_v9",)


def test_meltingpot_goes_before_lab2d_where_both_have_a_name():
    pytest.importorskip("meltingpot", reason="needs the extra meltingpot")
    assert "clean_up" in _built_by("clean_up", meltingpot)
    assert "clean_up" in _built_by("lab2d/clean_up", lab2d)
    assert "clean_up_0" in _built_by("clean_up_0", meltingpot)  # A scenario.


def test_each_family_lists_its_own_tasks():
    pytest.importorskip("meltingpot", reason="needs the extra meltingpot")
    assert {name.split("/")[0] for name in lab2d.available_tasks()} == {"lab2d"}
    found = meltingpot.available_tasks()
    assert {name.split("/")[0] for name in found} == {"meltingpot"}
    merged = tasks.available_tasks()
    assert (found | lab2d.available_tasks()).items() <= merged.items()


def test_aec_tasks_need_no_option():
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    env = pettingzoo.find_task("tictactoe_v3")()
    assert env.description.group_map
    env.close()


@pytest.mark.parametrize("family", [lab2d, meltingpot, pettingzoo])
def test_a_family_has_nothing_to_say_of_a_name_unlike_its_own(family):
    with pytest.raises(UnknownTaskError, match="^$"):
        family.find_task("elsewhere/nothing")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("multiwalker_v8", "This installation has sisl/multiwalker_v9"),
        ("multiwalkr_v9", "The nearest are sisl/multiwalker_v9"),
        ("waterworld_v4", "left PettingZoo with 1.26"),
        ("os:nothing", "must be module:name of something to import"),
        ("os:sep", "cannot be called"),
    ],
)
def test_an_unknown_task_says_where_to_look(task: str, message: str):
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    with pytest.raises(ValueError, match=message):
        tasks.find_factory(task, {})


def test_the_nearest_names_come_from_all_families():
    pytest.importorskip("meltingpot", reason="needs the extra meltingpot")
    with pytest.raises(ValueError, match="nearest are meltingpot/hidden_agenda"):
        tasks.find_factory("hiden_agenda", {})


def test_a_factory_of_the_user_may_build_an_environment_of_ours():
    env = pettingzoo.find_task("marl_collect.testing.free:FreeEnv")(n_agents=2)
    assert env.description.group_map == {"agent": ["agent_0", "agent_1"]}
    env.close()


def test_only_tasks_of_pettingzoo_need_a_render_mode():
    pytest.importorskip("meltingpot", reason="needs the extra meltingpot")
    for task, expected in [
        ("multiwalker_v9", {"render_mode": "rgb_array"}),
        ("hidden_agenda", {}),
        ("os:getcwd", {}),
    ]:
        found = tasks.find_factory(task, {}, pictures=True)
        assert found.keywords == expected


def _built_by(task: str, family) -> tuple:
    """Return the arguments with which ``family`` builds ``task``."""
    found = tasks.find_factory(task, {})
    assert found.func.__module__ == family.__name__
    return found.args
