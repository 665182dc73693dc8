"""Every key of every frame, from every collector, compared with the reference.

``make fuzz`` draws more examples, with other seeds. What differs is printed as code.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from oracle_cases import Case, check
from oracle_policies import CHANGES, KINDS
from oracle_strategies import TIMES, budget, cases, replacements
from oracle_worlds import Group, World

from marl_collect.buffers import frame_writer
from marl_collect.core.description import SMALL

# Collectors that are closed late must not fail the case that runs at that time.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400 * TIMES),
]

WORLDS = [
    World(state=True),
    World(groups=(Group(n=1, action="box"),), length=1, state=True),
    World(
        groups=(Group(observation="nested", mask="observation"), Group("_b", n=3)),
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


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_policy_in_some_worlds(name: str) -> None:
    suitable = [world for world in WORLDS if KINDS[name].suits(world)]
    for world in suitable[-3:]:  # The first world is for those that suit few others.
        case = Case(world, name, each=2, frames=6, events=((),))
        assert check(case) == 24 or KINDS[name].refused


# "Collector" is the order of one rollout, which the others must have too.
@pytest.mark.parametrize("kind", ["Collector", "serial", "parallel", "halves", "sync"])
def test_statistics_are_those_of_the_last_hundred_episodes(kind: str) -> None:
    # 108 episodes end in each batch, six of them in every second frame.
    world = World(length=2, fixed=True)
    events = ((), (("resume",),), ())
    case = Case(world, "random", collector=kind, workers=2, each=3, events=events)
    assert check(replace(case, frames=36)) == 864


def test_padding_is_not_put_into_a_buffer() -> None:
    case = Case(WORLDS[2], collector="sync", workers=2, each=2, frames=6, fewer=4)
    assert check(case) == 32
    assert check(replace(case, options={"replay_buffer": True})) == 32


@pytest.mark.torchrl_defect("D1")
@pytest.mark.parametrize("collector", ["Collector", "sync"])
@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"split_trajs": True},
        {"trajs_per_batch": 1},
        {"trajs_per_batch": 3},
        {"trajs_per_batch": 2, "traj_format": "cat"},
    ],
    ids=str,
)
def test_trajectories_of_batches(
    shape: dict[str, Any], in_buffer: bool, collector: str
) -> None:
    options = shape | ({"replay_buffer": True} if in_buffer else {})
    # Few frames: a batch that waits for more trajectories than it has takes longer.
    frames = 9 if "split_trajs" in shape else 2
    case = Case(WORLDS[0], collector=collector, each=2, frames=frames, options=options)
    events = ((), (("seed", 7),), (("seed", 3), ("resume",)), ())
    assert check(replace(case, events=events)) > 0


@pytest.mark.parametrize(
    ("collector", "more"),
    [("Collector", {}), ("sync", {}), ("sync", {"prefetch": True})],
)
@pytest.mark.parametrize(
    "policy", ["level", "normaliser", "assigned", "image_to_float"]
)
def test_random_frames_come_first(policy: str, collector: str, more: Any) -> None:
    world = next(world for world in WORLDS if KINDS[policy].suits(world))
    options = {"init_random_frames": 20, "update_at_each_batch": policy == "level"}
    two: Any = {"workers" if collector == "sync" else "each": 2}
    case = Case(world, policy, "policy", collector, **two, options=options | more)
    assert check(replace(case, events=((), (), ()))) == 32


SIMULATORS = [
    World(
        groups=(Group(n=3, mask="info"), Group("b")),
        batched=True,
        deaths=4,
        episode_reward=True,
    ),
    replace(WORLDS[2], batched=True, joins=False, respawns=False, info=True),
    replace(WORLDS[2], batched=True, joins=False, respawns=False, stack=2),
]


@pytest.mark.parametrize("world", [*SIMULATORS, replace(WORLDS[3], stack=3)])
def test_worlds_of_a_simulator_and_stacked_observations(world: World) -> None:
    case = Case(world, each=4, frames=15, events=((("seed", 7),), (("resume",),)))
    assert check(case) == 180
    assert check(replace(case, policy="legal", options={"check_actions": True})) == 180


CHANGES_ITS_INPUT = ("in_place", "pops", "renames", "wider", "returns_new")
ASSIGNED = ("assigned", "assigned_rows")
IN_WORKERS = (
    *CHANGES_ITS_INPUT,
    *("normaliser", "encoder", "excludes", "copies_then_overwrites", "own_buffers"),
    *("keeps_its_input", "sometimes_in_place", "several_outputs", "next_only"),
    *("remembers", "remembers_privately", "remembers_undeclared", "counts"),
    *("looks_for_beginnings", "statistics", "assigned_states", "assigned_rows"),
)


@pytest.mark.parametrize(
    ("name", "collector"),
    [
        *((name, "sync") for name in IN_WORKERS),
        *((name, "async") for name in (*CHANGES_ITS_INPUT, *ASSIGNED)),
        *((name, "halves") for name in (*CHANGES_ITS_INPUT, *ASSIGNED)),
    ],
)
def test_policies_in_workers_and_beside_processes(name: str, collector: str) -> None:
    world = next(world for world in WORLDS[2::-1] if KINDS[name].suits(world))
    case = Case(world, name, collector=collector, workers=2, each=2, frames=6)
    assert check(case) > 0 or KINDS[name].refused


@pytest.mark.parametrize("collector", ["Collector", "halves"])
@pytest.mark.parametrize("name", ["normaliser", "encoder", "pops", "recurrent"])
def test_compact_observations_that_a_policy_changes(name: str, collector: str) -> None:
    case = Case(WORLDS[0], name, collector=collector, each=2, frames=6)
    assert check(replace(case, options={"compact_obs": True})) == 24


def test_a_compiled_policy_may_change_its_observation() -> None:
    options = {"compile_policy": {"backend": "eager"}}
    case = Case(WORLDS[0], "encoder", each=2, frames=6, options=options)
    assert check(case) == 24


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("small", [0, SMALL])
def test_frames_are_written_in_blocks_or_if_they_are_large_one_by_one(
    small: int, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_writer, "SMALL", small)
    monkeypatch.setattr(frame_writer, "_BLOCK", 8)
    options = {"compact_obs": compact}
    for each in (1, 3):
        case = Case(WORLDS[2], "random", each=each, frames=20, options=options)
        assert check(case) == 40 * each


@pytest.mark.parametrize("event", [("seed", 7), ("reset",), ("resume",)])
def test_a_replacement_continues_what_its_worker_was_told(event: Any) -> None:
    """With the seed, the numbers and the draws of the last reset or state."""
    events = ((("kill", 1),), (event,), (), (("kill", 1),), ())
    case = Case(WORLDS[0], "random", collector="sync", workers=2, frames=5)
    options = {"on_worker_failure": "restart"}
    assert check(replace(case, events=events, options=options)) == 60


@pytest.mark.parametrize(("collector", "ranks"), [("Collector", 4), ("sync", 2)])
def test_trajectories_of_all_ranks(collector: str, ranks: int) -> None:
    """Together they collect what one process with four environments collects."""
    case = Case(WORLDS[2], "recurrent", collector=collector, each=4 // ranks, frames=9)
    case = replace(case, events=((("resume",),), ()), ranks=ranks)
    options = {"trajs_per_batch": 3, "max_frames_per_traj": 4}
    for rank in range(ranks):
        assert check(replace(case, rank=rank, options=options)) > 0


def resumed(
    world: World, policy: str, collector: str = "Collector", **options: Any
) -> Any:
    """Return a case that is resumed twice, one whose id is its code.

    Before that it is reset, unless that would drop a batch and its numbers of episodes.
    """
    workers = 1 if collector == "Collector" else 2
    first: Any = () if options.get("prefetch") else (("reset",),)
    first = (("reset", True, False),) if collector == "async" else first
    train = (("update",),) * KINDS[policy].weights
    before = ((),) * 3 * (collector == "async")  # Enough that each worker delivers one.
    case = Case(
        *(world, policy, "policy", collector, workers, 4 // workers),
        frames=7,
        events=(*before, (*train, *first), (("resume",),), (*train, ("resume",))),
        options=options,
    )
    shown = "-".join([policy, collector, *map(str, options)])
    return pytest.param(case, id=f"{shown}-{'worlds' if world.batched else 'single'}")


JUST_BEGUN = World((Group(), Group("b", action="box")), length=7, fixed=True)
"""No frame is open after a batch, and no action was taken."""


@pytest.mark.torchrl_defect("D4")
@pytest.mark.parametrize(
    "case",
    [
        resumed(WORLDS[0], "recurrent", max_frames_per_traj=4),
        resumed(WORLDS[0], "draws_without_use"),
        resumed(JUST_BEGUN, "random", "sync"),
        resumed(JUST_BEGUN, "random", trajs_per_batch=2),
        resumed(WORLDS[0], "level", split_trajs=True, set_truncated=True),
        resumed(WORLDS[0], "level", trajs_per_batch=2, traj_format="cat"),
        resumed(SIMULATORS[0], "assigned_recurrent", max_frames_per_traj=9),
        resumed(SIMULATORS[0], "level", trajs_per_batch=2),
        resumed(WORLDS[0], "remembers_privately", "parallel"),
        resumed(WORLDS[2], "assigned", "halves"),
        resumed(WORLDS[2], "random", "sync", max_frames_per_traj=5),
        resumed(WORLDS[2], "assigned_states", "sync"),
        resumed(WORLDS[2], "remembers_undeclared", "sync", prefetch=True),
        # Every second batch begins with the first frames of episodes.
        resumed(World(length=14, fixed=True), "recurrent", "sync", prefetch=True),
        resumed(WORLDS[0], "level", "sync", reset_at_each_iter=True),
        resumed(WORLDS[0], "recurrent", "sync", compact_obs=True),
        resumed(WORLDS[0], "level", "sync", cat_results=-1),
        resumed(WORLDS[0], "level", "sync", trajs_per_batch=2),
        resumed(SIMULATORS[0], "assigned_pool", "sync", track_policy_version=True),
        resumed(WORLDS[0], "recurrent", "async", track_policy_version=True),
        resumed(WORLDS[2], "random", "async", max_staleness=1),  # One is idle.
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(case: Case) -> None:
    assert check(case) > 0


FOUR: Any = {"workers": 2, "each": 2}
CHANGED = (
    (("call", 1), ("level", 2)),
    (),
    (("call", 2), ("call", 1)),
    (("call", 1), ("level", 0)),
    (("call", 5), ("resume",), ("resume",)),
    (),
    (("level", 3), ("call", 3), ("resume",), ("call", 4)),
)
KILLED = (
    (("call", 1), ("level", 2)),
    (("kill", 1),),
    (("level", 1), ("call", 2, 1, 2), ("kill", 0)),
    (("kill", 0), ("level", 3)),
)
RESTART = {"on_worker_failure": "restart"}


@pytest.mark.parametrize(
    "case",
    [
        Case(WORLDS[2], each=3),
        Case(WORLDS[4], each=3),
        Case(replace(WORLDS[3], stack=3), each=3),
        Case(World(repeats=False, state=True), each=3),
        # Episodes begin with the second calls, after them, and before all calls.
        *(Case(World(length=frames, fixed=True), each=3) for frames in (18, 20, 60)),
        Case(SIMULATORS[0], each=3),
        Case(WORLDS[0], collector="serial", **FOUR),
        Case(WORLDS[0], collector="halves", **FOUR),
        Case(SIMULATORS[2], collector="sync", **FOUR),
        *(
            Case(WORLDS[0], collector="sync", **FOUR, options={name: value})
            for name, value in (
                *(("prefetch", True), ("max_worker_rss", 1), ("split_trajs", True)),
                *(("compact_obs", True), ("max_frames_per_traj", 3)),
                *(("track_traj_ids", False), ("reset_at_each_iter", True)),
            )
        ),
    ],
    ids=lambda case: f"{case.collector}-{[*case.options, *case.world.agents][0]}",
)
def test_levels_and_calls_act_from_the_next_batch_on(case: Case) -> None:
    reset = () if "prefetch" in case.options else (("reset",),)
    events = (*CHANGED, (("level", 1), ("call", 6), *reset), (("resume",),))
    case = replace(case, frames=6, level=1, events=events)
    assert check(case) > 0


@pytest.mark.parametrize(
    ("events", "options"),
    [
        (KILLED, RESTART),
        (KILLED, RESTART | {"max_worker_rss": 1}),
        (
            ((("level", 2),), (("level", 1), ("reset", True, False)), ()),
            {"prefetch": True},
        ),
        (((("level", 2), ("call", 1), ("seed", 7)), ()), {"prefetch": True}),
        ((*CHANGED, ()), {"trajs_per_batch": 3, "traj_format": "cat"}),
        (
            ((), (("reset", True, False),), (), (("reset", False, True),), ()),
            {"trajs_per_batch": 8},
        ),
        (
            (
                *(
                    (("publish", 1), ("resume",)),
                    (("update",), ("train",), ("resume",)),
                ),
                *((("update", 0), ("resume",)), ()),
            ),
            {"track_policy_version": True},
        ),
        (
            ((), (), ()),
            {
                "trajs_per_batch": 2,
                "update_at_each_batch": True,
                "track_policy_version": True,
            },
        ),
    ],
)
def test_workers_do_what_each_of_them_was_told_last(events: Any, options: Any) -> None:
    case = Case(WORLDS[0], "level", collector="sync", **FOUR, frames=6, level=0)
    assert check(replace(case, events=events, options=options)) > 0


SPAWNED = Case(collector="sync", options={"start_method": "spawn"})


@pytest.mark.parametrize(
    "case", [SPAWNED, Case(collector="nested", workers=2)], ids=["spawned", "nested"]
)
def test_workers_of_other_kinds_act_alike(case: Case) -> None:
    events = (("level", 2), ("call", 1), ("update",)), (("reset",),), ()
    case = replace(case, world=WORLDS[0], policy="level", each=2, frames=6, level=0)
    assert check(replace(case, events=events)) > 0


SETTINGS = ("settings", "fused_settings", "assigned_settings", "fused_constants")


@pytest.mark.parametrize("kind", ["Collector", "halves", "sync"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_setting_acts_after_each_update(name: str, kind: str) -> None:
    if KINDS[name].outside and kind == "sync":
        return  # Constants of the trainer's process do not reach workers.
    events = ((("update",),),) * (len(CHANGES) + 1)
    case = Case(WORLDS[0], name, collector=kind, each=2, frames=4, events=events)
    assert check(case) > 0


@pytest.mark.parametrize(
    ("policy", "source", "collector"),
    [
        *(("random", "policy", collector) for collector in ("Collector", "sync")),
        *(("modules", source, "sync") for source in ("policy", "factory")),
        *(("function", source, "sync") for source in ("policy", "factory")),
        *((policy, "policy", "Collector") for policy in ("modules", "function")),
    ],
)
def test_policies_without_weights_may_be_updated_at_each_batch(
    policy: str, source: str, collector: str
) -> None:
    case = Case(WORLDS[0], policy, source, collector, each=2, frames=4)
    case = replace(case, options={"update_at_each_batch": True}, events=((), ()))
    assert check(case) == 24


@pytest.mark.parametrize("source", ["policy", "factory"])
@pytest.mark.parametrize("kept", ["buffers", "frozen_parameters"])
def test_an_update_resets_what_workers_have_written(kept: str, source: str) -> None:
    case = Case(WORLDS[0], f"statistics_in_{kept}", source, "sync", each=2, frames=4)
    assert check(replace(case, events=((("update",),),) * 3)) == 32


@pytest.mark.parametrize("kind", ["Collector", "halves", "sync"])
def test_past_versions_act_as_they_were(kind: str) -> None:
    case = Case(WORLDS[0], "assigned_pool", collector=kind, each=2, frames=4)
    keep, update = ("keep",), ("update",)
    events = ((keep, update), (update,), (update, keep), (keep, ("resume",)), ())
    assert check(replace(case, events=events)) > 0


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


@pytest.mark.torchrl_defect("D23")
@budget(15)
@given(cases(("async",)))
def test_multi_async_collector(case: Case) -> None:
    check(case)


@budget(20)
@given(cases(("serial", "parallel", "halves")))
def test_batches_of_environments(case: Case) -> None:
    check(case)
