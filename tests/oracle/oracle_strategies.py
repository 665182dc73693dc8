"""The combinations that the property tests draw."""

import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from oracle_cases import DELIVERIES, TRAINER, Case
from oracle_policies import KINDS, OF_ONE_FRAME
from oracle_worlds import Group, World

TIMES = int(os.environ.get("MARL_COLLECT_TIMES", "1"))
"""How many times the usual number of examples is drawn."""

ENVIRONMENTS = {"Collector": (1, 3), "halves": (2, 3)}
"""Fewest and most environments of a worker."""

SIMULATED: dict[str, Any] = {
    "batched": True,
    **dict.fromkeys(("turns", "vanish", "rests", "joins", "respawns"), False),
    **dict.fromkeys(("chatty", "agent_ids"), False),
    "absent": "dead",
}
"""What a simulator of many worlds has, and has not."""
SOURCES = ["policy", "factory", "list"]
"""Where workers have their policy from."""

SEVERAL = st.sampled_from([1, 2, 2, 3])

booleans = st.booleans()
# Shrinks to False, because examples shrink to the simplest options.
seldom = st.integers(0, 3).map(lambda number: number == 3)


def budget(examples: int) -> Any:
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def groups(draw: st.DrawFn, name: str) -> Group:
    actions: list[Any] = ["discrete", "discrete", "box", "multi"]
    action = draw(st.sampled_from(actions))
    masks = ["", "observation", "info"] if action == "discrete" else [""]
    return Group(
        name=name,
        n=draw(st.integers(1, 3)),
        observation=draw(st.sampled_from(["flat", "nested"])),
        action=action,
        mask=draw(st.sampled_from(masks)),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = draw(st.sampled_from([["a"], ["a"], ["a", "_b"]]))
    turns = draw(st.sampled_from([False, False, True]))
    deaths = draw(st.sampled_from([0, 0, 3, 8]))
    repeats = not draw(seldom)
    rests = not turns and draw(seldom)
    waits = draw(booleans) if rests else draw(seldom)
    described = tuple(draw(groups(name)) for name in names)
    if rests and any(group.mask == "observation" for group in described):
        # Infos of agents that rest are found with action_mask="info" only.
        described = tuple(
            replace(group, mask="") if group.mask == "info" else group
            for group in described
        )
    return World(
        repeats=repeats,
        told=repeats or draw(booleans),
        groups=described,
        turns=turns,
        length=draw(st.integers(1, 8)),
        fixed=draw(booleans),
        deaths=deaths,
        vanish=bool(deaths) and not turns and draw(booleans),
        joins=draw(booleans),
        respawns=bool(deaths) and not turns and draw(booleans),
        chatty=not turns and draw(booleans),
        state=not repeats or draw(booleans),
        info=draw(booleans),
        done_on_any=draw(st.sampled_from([None, False, True])),
        use_mask=turns or waits or not draw(booleans),
        categorical=not draw(booleans),
        agent_ids=draw(booleans),
        episode_reward=draw(booleans),
        stack=draw(seldom) * draw(st.integers(1, 3)),
        rests=rests,
        absent="waiting" if waits else "dead",
    )


def suitable(world: World, collector: str) -> list[str]:
    """Return the kinds of policies for a world; repeated kinds are more likely."""
    # Every worker imports TorchRL for these, which takes seconds.
    slow = collector in ("sync", "async")
    return [
        name
        for name, kind in KINDS.items()
        for _ in range(1 if slow and kind.draws == "torch" else 6)
        if kind.suits(world)
        and not (world.stack and name in OF_ONE_FRAME)
        and (not kind.outside or collector in TRAINER)
        and (collector != "halves" or not (kind.alone or kind.draws == "torch"))
    ]


@st.composite
def repeating_worlds(draw: st.DrawFn) -> World:
    world = replace(draw(worlds()), repeats=True, told=True)
    return replace(world, **SIMULATED) if draw(seldom) else world


def suitable_in_workers(world: World) -> list[str]:
    """Return the policies whose actions are known bit by bit for each episode."""
    return [
        name
        for name in dict.fromkeys(suitable(world, "sync"))
        for kind in [KINDS[name]]
        if kind.exact and kind.draws == "" and not (kind.alone or kind.refused)
    ]


@st.composite
def options(draw: st.DrawFn, case: Case) -> dict[str, Any]:
    kind = KINDS[case.policy]
    pool = case.collector in ("sync", "async")
    keywords: dict[str, Any] = {}

    def maybe(name: str, values: Any, *, condition: bool = True) -> None:
        if condition and draw(seldom):
            keywords[name] = draw(values)

    maybe("max_frames_per_traj", st.integers(1, 6))
    maybe("set_truncated", st.just(True))
    maybe("track_policy_version", st.just(True))
    maybe("use_buffers", st.just(False))
    maybe("on_worker_failure", st.just("restart"), condition=pool and not kind.keeps)
    maybe("prefetch", st.just(True), condition=case.collector == "sync")
    maybe("max_worker_rss", st.just(1), condition=pool and not kind.keeps)
    maybe("check_actions", st.just(True), condition=kind.legal)
    if case.collector == "async":
        maybe("compact_obs", st.just(True))
        maybe("max_staleness", st.integers(0, 2))
        if kind.weights:
            keywords["track_policy_version"] = True
        return keywords
    maybe("reset_at_each_iter", st.just(True))
    maybe("init_random_frames", st.integers(1, 12), condition=case.policy != "wider")
    trained = kind.weights and case.source == "policy"
    maybe("update_at_each_batch", st.just(True), condition=trained)
    keywords |= draw(shapes(case, "on_worker_failure" not in keywords))
    if "trajs_per_batch" in keywords:
        for name in ("reset_at_each_iter", "set_truncated"):  # They exclude it.
            keywords.pop(name, None)
    return keywords


@st.composite
def shapes(draw: st.DrawFn, case: Case, certain: bool) -> dict[str, Any]:
    """Draw at most one option about the shape of batches."""
    kind = KINDS[case.policy]
    # The reference uses recorded frames if bits or episodes are uncertain, which needs
    # batches [B, T] with trajectory ids.
    independent = kind.exact and kind.draws == "" and case.world.repeats
    ways: list[dict[str, Any]] = [{}, {}, {}, {"compact_obs": True}]
    if case.world.repeats and certain:
        ways += [{"track_traj_ids": False}]
    if independent:
        ways += [{"split_trajs": True}, {"replay_buffer": True}]
        ways += [
            {"trajs_per_batch": count, "traj_format": form}
            for count, form in [(1, "padded"), (3, "padded"), (2, "cat")]
        ]
    if independent and case.collector == "sync":
        ways += [{"cat_results": cat_results} for cat_results in ("stack", 0, -1)]
    way = draw(st.sampled_from(ways))
    in_buffer = bool(DELIVERIES & set(way)) and draw(seldom)
    return way | ({"replay_buffer": True} if in_buffer else {})


def possible_events(case: Case) -> list[tuple[Any, ...]]:
    """Return the possible events between two batches; () is none."""
    kind = KINDS[case.policy]
    pool, asynchronous = case.collector in ("sync", "async"), case.collector == "async"
    ahead = asynchronous or case.options.get("prefetch")
    possible: list[tuple[Any, ...]] = [()]
    if kind.weights:
        possible += [("update",)] * 2
        possible += [("update", index) for index in range(case.workers) if pool]
        possible += [("keep",)] * ("pool" in case.policy)
    if ahead and kind.keeps:
        return possible  # A policy with statistics has seen frames that are dropped.
    possible += [("seed", 7)]
    if case.level is not None:
        possible += [("level", 0), ("level", 3)]
    if not asynchronous and not (ahead and case.workers > 1):
        # A partial reset repeats the frames of a dropped batch, but calls are not
        # undone.
        possible += [("call", 1)]
        possible += [("call", 2, 0)] * (not case.world.batched)
    if not ahead:
        # A dropped batch has used up numbers of episodes.
        possible += [("reset",)]
    if pool and case.workers > 1:
        possible += [("reset", *[k != 0 for k in range(case.workers)])]
    if not kind.keeps:
        possible += [("resume",)]
    # A prefetching worker may have finished its batch before it is killed.
    if pool and case.options.get("on_worker_failure") and not ahead:
        possible += [("kill", index) for index in range(case.workers)]
        # A new process id tells who crashed, unless large workers are replaced too.
        if not {*DELIVERIES, "max_worker_rss"} & set(case.options):
            possible += [("crash",)]
    return possible


@st.composite
def events(draw: st.DrawFn, case: Case) -> tuple[tuple[Any, ...], ...]:
    possible = st.lists(st.sampled_from(possible_events(case)), max_size=2)
    events_by_batch = []
    for _ in range(draw(st.integers(0, 3))):
        batch_events = [event for event in draw(possible) if event]
        if {event[0] for event in batch_events} & {"seed", "reset", "resume"}:
            # The number of an episode that was begun and never delivered is undefined.
            batch_events = [
                event for event in batch_events if event[0] not in ("kill", "crash")
            ]
        if ("crash",) in batch_events:
            # A worker that fails again before its first batch is not replaced.
            batch_events = [event for event in batch_events if event[0] != "kill"]
        events_by_batch.append(tuple(batch_events))
    return tuple(events_by_batch)


@st.composite
def replacements(draw: st.DrawFn) -> Case:
    """Draw workers that die between and within batches, before and after updates.

    The worlds are without turns, because workers do not depend on them.
    """
    world = replace(draw(worlds()), repeats=True, turns=False)
    names = [
        name
        for name in suitable(world, "sync")
        if KINDS[name].weights and not (KINDS[name].keeps or KINDS[name].draws)
    ]
    policy = draw(st.sampled_from(names))
    sources = ["policy"] if policy.startswith("assigned") else SOURCES
    case = Case(
        world=world,
        collector="sync",
        policy=policy,
        source=draw(st.sampled_from(sources)),
        workers=2,
        each=draw(st.integers(1, 2)),
        frames=draw(st.integers(2, 8)),
        seed=draw(st.integers(0, 3)),
        options={"on_worker_failure": "restart", "track_policy_version": True},
    )
    updates = st.sampled_from([(), ("update",), ("update",), ("update", 0)])
    deaths = st.sampled_from([("kill", 0), ("kill", 1), ("crash",)])
    events = draw(st.lists(st.tuples(updates, deaths), min_size=1, max_size=4))
    return replace(case, events=tuple(tuple(filter(None, pair)) for pair in events))


@st.composite
def cases(draw: st.DrawFn, collectors: tuple[str, ...]) -> Case:
    collector = draw(st.sampled_from(collectors))
    world = draw(worlds())
    if collector not in ("serial", "parallel", "halves") and draw(seldom):
        world = replace(world, **SIMULATED)
    case = Case(
        world=world,
        collector=collector,
        policy=draw(st.sampled_from(suitable(world, collector))),
        workers=draw(SEVERAL if collector != "Collector" else st.just(1)),
        each=draw(st.integers(*ENVIRONMENTS.get(collector, (1, 2)))),
        frames=draw(st.integers(1, 10)),
        seed=draw(st.integers(0, 3)),
        deterministic=draw(seldom),
        hold=draw(booleans),
    )
    kind = KINDS[case.policy]
    alike = kind.weights and not (kind.keeps or kind.draws == "torch")
    if collector in ("sync", "async") and alike and "assigned" not in case.policy:
        case = replace(case, source=draw(st.sampled_from(SOURCES)))
    if draw(seldom):
        case = replace(case, level=draw(st.integers(0, 2)))
    case = replace(case, options=draw(options(case)))
    if case.workers > 1 and collector == "sync" and "split_trajs" not in case.options:
        case = replace(case, fewer=draw(st.integers(0, case.frames - 1)))
    if "trajs_per_batch" not in case.options and collector != "async":
        case = replace(case, bounded=draw(booleans))
    ranks = draw(st.sampled_from([1, 1, 1, 4]))
    case = replace(case, ranks=ranks, rank=draw(st.integers(0, ranks - 1)))
    return replace(case, events=draw(events(case)))
