"""Every key of every frame, from every collector, compared with the reference."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from oracle_cases import Case, check
from oracle_policies import KINDS
from oracle_strategies import cases, replacements
from oracle_worlds import Group, World

# Collectors that are closed late must not fail the case that runs at that time.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

WORLDS = [
    World(state=True),
    World(groups=(Group(n=1, action="box"),), length=1, state=True),
    World(
        groups=(Group(observation="nested", mask="observation"), Group("b", n=3)),
        deaths=4,
        joins=True,
        respawns=True,
        done_on_any=False,
        length=12,
        state=True,
    ),
    World(
        groups=(Group(n=3, mask="observation"),),
        deaths=6,
        rests=True,
        absent="waiting",
        done_on_any=False,
        length=12,
        agent_ids=True,
        info=True,
    ),
    World(groups=(Group(n=3, mask="info"),), turns=True, deaths=6, length=12),
]


def budget(examples: int) -> Any:
    return settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_policy_in_some_worlds(name: str) -> None:
    suitable = [world for world in WORLDS if KINDS[name].suits(world)]
    for world in suitable[-3:]:  # The first world is for those that suit few others.
        case = Case(world, name, each=2, frames=6, events=((),))
        assert check(case) == 24 or KINDS[name].refused


def test_a_resumed_collector_of_two_groups_keeps_who_acts() -> None:
    case = Case(WORLDS[2], "assigned", "halves", each=4, events=((("resume",),),))
    assert check(case) == 32


@pytest.mark.parametrize("kind", ["Collector", "sync"])
def test_statistics_are_those_of_the_last_hundred_episodes(kind: str) -> None:
    world = World(length=2, fixed=True)
    case = Case(world, "random", kind, each=3, frames=32, events=((), (("resume",),)))
    assert check(case) == 288


def test_padding_is_not_put_into_a_buffer() -> None:
    case = Case(WORLDS[2], collector="sync", workers=2, each=2, frames=6, fewer=4)
    assert check(case) == 32
    assert check(replace(case, options={"replay_buffer": True})) == 32


SIMULATORS = [
    World(groups=(Group(n=3, mask="info"), Group("b")), batched=True, deaths=4),
    replace(WORLDS[2], batched=True, joins=False, respawns=False, info=True),
    replace(WORLDS[2], batched=True, joins=False, respawns=False, stack=2),
]


@pytest.mark.parametrize("world", [*SIMULATORS, replace(WORLDS[3], stack=3)])
def test_worlds_of_a_simulator_and_stacked_observations(world: World) -> None:
    case = Case(world, each=4, frames=15, events=((("seed", 7),), (("resume",),)))
    assert check(case) == 180
    assert check(replace(case, policy="legal", options={"check_actions": True})) == 180


SETTINGS = ("settings", "fused_settings", "assigned_settings", "fused_constants")


@pytest.mark.parametrize("kind", ["Collector", "halves", "sync"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_setting_acts_after_each_update(name: str, kind: str) -> None:
    if KINDS[name].outside and kind == "sync":
        return  # Constants of the trainer's process do not reach workers.
    events = ((("update",),),) * 8
    case = Case(WORLDS[0], name, kind, each=2, frames=4, events=events)
    assert check(case) > 0


@budget(50)
@given(cases(("Collector",)))
def test_collector(case: Case) -> None:
    check(case)


@budget(30)
@given(cases(("sync",)))
def test_multi_sync_collector(case: Case) -> None:
    check(case)


@budget(12)
@given(replacements())
def test_replaced_workers(case: Case) -> None:
    check(case)


@budget(15)
@given(cases(("async",)))
def test_multi_async_collector(case: Case) -> None:
    check(case)


@budget(20)
@given(cases(("serial", "parallel", "halves")))
def test_batches_of_environments(case: Case) -> None:
    check(case)
