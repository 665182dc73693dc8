"""Tasks are found by name in every family, and errors say where else to look."""

import pytest

from marl_collect.envs import registry as by_name
from marl_collect.envs.pettingzoo.tasks import UnknownTaskError


def test_names_lead_to_the_family_that_has_them():
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    tasks = by_name.available_tasks()
    assert tasks["sisl/multiwalker_v9"] == ""
    for name in ("multiwalker_v9", "sisl/multiwalker_v9"):
        assert by_name.find_task(name).args == ("sisl/multiwalker_v9",)


def test_meltingpot_goes_before_lab2d_where_both_have_a_name():
    pytest.importorskip("meltingpot", reason="needs the extra meltingpot")
    assert by_name.find_task("clean_up").func.__name__ == "_build_meltingpot"
    assert by_name.find_task("lab2d/clean_up").func.__name__ == "_build_lab2d"
    assert by_name.find_task("clean_up_0").args == ("clean_up_0",)  # A scenario.


def test_agents_that_take_turns_need_no_option():
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    env = by_name.find_task("tictactoe_v3")()
    assert env.description.group_map
    env.close()


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
    with pytest.raises(UnknownTaskError, match=message):
        by_name.find_task(task)


def test_a_factory_of_the_user_may_build_a_pettingzoo_environment():
    env = by_name.find_task("marl_collect.testing.free:FreeEnv")(n_agents=2)
    assert env.description.group_map == {"agent": ["agent_0", "agent_1"]}
    env.close()
