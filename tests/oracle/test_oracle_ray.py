"""The same comparison with actors on Ray."""

from dataclasses import replace

import pytest
from oracle_cases import Case, check
from oracle_worlds import Group, World

pytest_plugins = ["support.ray_cluster"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore"),
]

DYING = World(
    groups=(Group(observation="nested", mask="observation"), Group("b", n=1)),
    deaths=4,
    joins=True,
    respawns=True,
    done_on_any=False,
    length=9,
    state=True,
)
TEAMS = {"num_workers_per_collector": 2}


@pytest.mark.parametrize(
    "case",
    [
        Case(World(length=4), "level", events=((("update",),), (("resume",),))),
        Case(
            DYING, "normaliser", options={"max_frames_per_traj": 6, "max_worker_rss": 1}
        ),
        Case(DYING, "random", events=((("reset", False, True),), (("seed", 7),))),
        Case(
            World(turns=True, deaths=5, groups=(Group(n=3, mask="info"),)),
            "remembers",
            events=((), (("reset",),)),
            options={"set_truncated": True},
        ),
        Case(
            World(length=3),
            "fused_level",
            events=((("update", 1),), (("update",),)),
            options={"track_policy_version": True, "split_trajs": True},
        ),
        Case(DYING, "assigned_weights", events=((("update", 1),), (("resume",),), ())),
        Case(World(length=4), "assigned_pool", events=((("update",),), (("resume",),))),
        Case(replace(DYING, batched=True, joins=False, respawns=False), each=2),
        Case(
            DYING,
            "level",
            "list",
            workers=4,
            events=((("kill", 1),), (("update",), ("kill", 2)), (("crash",),)),
            options={"on_worker_failure": "restart", **TEAMS},
        ),
        Case(
            World(length=3),
            "level",
            "factory",
            workers=4,
            events=((("update", 2),), ()),
            options={"prefetch": True, "track_policy_version": True, **TEAMS},
        ),
    ],
    ids=lambda case: f"{case.policy}-{case.source}",
)
def test_ray_collector(case: Case) -> None:
    workers = max(2, case.workers)
    check(replace(case, collector="ray", workers=workers, frames=7))
