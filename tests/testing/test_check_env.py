"""check_env finds and names every kind of violation, also in simulators of worlds."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import pytest
from gymnasium import spaces
from support.worlds import CountingWorlds
from workloads.counting import CountingEnv, CountingOptions, Fault

from marl_collect import (
    BatchedEnv,
    ContractError,
    EnvDescription,
    GroupDescription,
    Step,
    check_env,
)
from marl_collect.core.description import Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags

pytest.importorskip("torch")

UNIT = spaces.Box(-1, 1, (2,), np.float32)
PAIR = EnvDescription(
    name="pair",
    groups={
        "pair": GroupDescription(
            agents=("pair_0", "pair_1"),
            observation=spaces.Box(-5, 5, (2,), np.float32),
            action=spaces.Discrete(3),
        )
    },
)


@final
class Pair(MultiAgentEnv):
    """Two agents that add up actions, with an optional violation.

    ``harm`` is called with this object at the end of ``reset_row`` and ``step_row``.
    """

    def __init__(
        self, harm: "Harm | None" = None, description: EnvDescription = PAIR
    ) -> None:
        self.description_ = description
        self.harm = harm
        self.closed = False
        self.episodes = 0

    @property
    def description(self) -> EnvDescription:
        return self.description_

    @property
    def is_closed(self) -> bool:
        return self.closed

    def bind(self, row: Row) -> None:
        self.row = row
        self.flags = Flags(row, self.description_)
        self.first_row = getattr(self, "first_row", row)

    def reset_row(self, seed: int) -> None:
        self.steps = 0
        self.episodes += 1
        self.total = np.array([seed % 3, 1.0])
        self.flags.clear()
        self.write()

    def step_row(self) -> None:
        self.steps += 1
        self.total = (self.total + self.row["pair", "action"]) % 4
        self.row["pair", "reward"][:, 0] = self.total
        if self.steps == 4:
            self.flags.end_all(terminated=True, truncated=False)
        self.write()

    def write(self) -> None:
        self.row["pair", "observation"][:, 0] = self.total
        self.row["pair", "observation"][:, 1] = self.steps
        self.row["pair", "mask"][...] = self.row["pair", "done"][:, 0] == 0
        if self.harm is not None:
            self.harm(self)

    def render(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


Harm = Callable[[Pair], None]


def findings(factory: Callable[[], Any], **keywords: int) -> str:
    with pytest.raises(ContractError) as excinfo:
        check_env(factory, **keywords)
    return "\n".join(excinfo.value.findings)


def described(**changes: Any) -> EnvDescription:
    return replace(PAIR, groups={"pair": replace(PAIR.groups["pair"], **changes)})


def at(steps: Collection[int], *changes: Harm) -> Harm:
    """Return several changes after some steps; 0 is the reset."""

    def do(env: Pair) -> None:
        for change in changes if env.steps in steps else ():
            change(env)

    return do


def put(name: str, value: Any, index: Any = ...) -> Harm:
    def do(env: Pair) -> None:
        env.row["pair", name][index] = value

    return do


def end(*agents: int) -> Harm:
    def do(env: Pair) -> None:
        for agent in agents:
            env.flags.end("pair", agent, terminated=True, truncated=False)

    return do


def revive(env: Pair) -> None:
    env.flags.revive("pair", 0)


def end_root(env: Pair) -> None:
    env.row["done",][0] = env.row["terminated",][0] = True


def put_root(name: str, value: Any) -> Harm:
    def do(env: Pair) -> None:
        env.row[name,][...] = value

    return do


def say_done(env: Pair) -> None:
    env.row["done",][...] = True


def count_episodes(env: Pair) -> None:
    env.row["pair", "observation"][0, 1] = env.episodes % 5


def remember_what_was_left(env: Any) -> None:
    if env.steps == 0 and getattr(env, "last", 0) in (1, 2, 3):
        env.row["pair", "observation"][0, 1] = 1
    env.last = env.steps


def add_to_memory(env: Pair) -> None:
    total = env.row["pair", "episode_reward"]
    np.add(total, env.row["pair", "reward"], out=total)


def write_to_old_memory(env: Pair) -> None:
    env.first_row["pair", "reward"][...] = 0


@pytest.mark.parametrize(
    "options",
    [
        CountingOptions(),
        CountingOptions(action_mask=True, state=True, episode_reward=True),
        CountingOptions(image=(4, 4, 3), done_on_any=True, categorical_actions=False),
        CountingOptions(n_prey=0, mask=False, deaths=False),
    ],
)
def test_the_counting_environment_passes(options: CountingOptions) -> None:
    check_env(lambda: CountingEnv(options))


STEPS = range(1, 9)
GONE = at(STEPS[1:], end(0), put("mask", False, 0))
MASKED = described(action_mask=True)
STATE = replace(PAIR, root={"state": UNIT})
WRONG: dict[str, tuple[Any, ...]] = {
    "pair/observation of pair_0 is out of bounds": (put("observation", 9.0),),
    "pair/observation of pair_1 is NaN": (at([4], put("observation", np.nan)),),
    "step_row() changes pair/action": (at(STEPS, put("action", 0)),),
    "longer than the time limit of 3": (None, replace(PAIR, time_limit=3)),
    "The root's terminated must be all of the agents'": (
        at([4], put_root("terminated", False), put_root("truncated", True)),
    ),
    **{
        f"state is {problem}": (put_root("state", value), STATE)
        for problem, value in (("NaN", np.nan), ("out of bounds", 2.0))
    },
    "pair/reward of pair_0 is inf": (at([2], put("reward", np.inf)),),
    "must be False after a reset": (at([0], put("done", True)),),
    "done of pair_0 must be terminated or truncated": (at([2], put("done", True, 0)),),
    "The root's done must be": (at([2], say_done),),
    "mask is True for pair_0, which is done": (at([4], put("mask", True)),),
    "No agent acts": (at([1], put("mask", False)),),
    "The root must be done": (at([2], end(0, 1)),),
    "so every agent must be": (at([2], end_root),),
    "observation of pair_0 is not zero after its end": (GONE,),
    **{
        f"pair/reward of pair_0 is {reward} after its end": (
            at(
                range(9),
                at([1], end(0)),
                at(STEPS, put("mask", False, 0)),
                at(STEPS[1:], put("observation", 0, 0), put("reward", reward, 0)),
            ),
        )
        for reward in (-0.5, 0.5, -np.inf)
    },
    "truncated of pair_0 changed after its end": (
        at(STEPS, at([1], end(0)), at([2], put("truncated", True, 0))),
    ),
    "or all become False if the agent comes": (
        at(STEPS, at([1], end(0)), at([2], revive, put("truncated", True, 0))),
    ),
    **{
        f" {dtype.__name__}, which cannot hold the value 0.5": (
            put("observation", 0.5, (0, 0)),
            described(observation=spaces.Box(0, 5, (2,), dtype)),
        )
        for dtype in (np.int8, np.uint8)
    },
    "state differs after the reset": (None, STATE),
    "state has the dtype int8, which cannot hold the value 0.5": (
        put_root("state", 0.5),
        replace(PAIR, root={"state": spaces.Box(0, 5, (2,), np.int8)}),
    ),
    "after an episode that was left after a step": (remember_what_was_left,),
    "pair_0 is 2 times in the groups": (None, described(agents=("pair_0", "pair_0"))),
    "'next' is the name of another key": (
        None,
        replace(PAIR, groups={"next": PAIR.groups["pair"]}),
    ),
    "must start at 0": (None, described(action=spaces.Discrete(3, start=1))),
    "pair/observation": (None, described(observation=spaces.Text(3))),
    "action_mask leaves pair_0 no action": (put("action_mask", False), MASKED),
    "action_mask of pair_1, which does not act, must be all True": (
        at(
            range(9),
            put("action_mask", True),
            at([2], put("mask", False, 1), put("action_mask", False, (1, 1))),
        ),
        MASKED,
    ),
    "memory bound before": (write_to_old_memory,),
    "depends on more than its seed and its actions": (count_episodes,),
    "pair/observation differs after the reset": (count_episodes,),
    "reset_row": (put("observation", np.zeros((2, 3))),),
    "raised ValueError": (put("observation", np.zeros((2, 3))),),
    **dict.fromkeys(
        ("Some memory is not written, or is read", "pair/episode_reward"),
        (at(STEPS, add_to_memory), described(episode_reward=True)),
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message: str) -> None:
    assert message in findings(lambda: Pair(*WRONG[message]))


@pytest.mark.parametrize(
    ("harm", "description"),
    [
        (None, PAIR),
        (count_episodes, replace(PAIR, repeats=False)),
        (  # An agent may come back.
            at(
                STEPS,
                at([1, 2], end(0), put("mask", False, 0)),
                at([2], put("observation", 0, 0), put("reward", 0, 0)),
                at([3], revive, put("mask", True, 0)),
            ),
            PAIR,
        ),
    ],
)
def test_what_is_right_passes(harm: Any, description: EnvDescription) -> None:
    check_env(lambda: Pair(harm, description))


def test_a_violation_in_many_steps_is_reported_once_with_its_first_step() -> None:
    def harm(env: Pair) -> None:
        if env.steps >= 2:
            env.row["pair", "observation"][0, 0] = 6 + env.steps

    with pytest.raises(ContractError) as excinfo:
        check_env(lambda: Pair(harm), episodes=2)
    (finding,) = excinfo.value.findings
    assert finding.startswith("Step 2 of seed")
    assert "pair_0 is out of bounds" in finding
    assert finding.endswith("(Found 4 times.)")  # steps 2 and 3 of two episodes


def test_a_violation_of_two_agents_is_reported_for_each() -> None:
    harm = put("observation", 9.0)
    with pytest.raises(ContractError) as excinfo:
        check_env(lambda: Pair(harm))
    after_reset = [f for f in excinfo.value.findings if not f.startswith("Step")]
    assert len(after_reset) == 2
    assert len(excinfo.value.findings) == 4


def test_findings_of_the_environment_s_audit_are_reported() -> None:
    class Unsure(Pair):  # type: ignore[misc]
        def audit(self) -> list[str]:
            return ["something is odd"] if self.steps == 2 else []

    assert "Step 2 of seed" in findings(Unsure)
    assert "something is odd" in findings(Unsure)


def test_two_builds_that_differ_are_named() -> None:
    sizes = iter([2, 3])

    def factory() -> CountingEnv:
        return CountingEnv(n_hunters=next(sizes))

    assert "Two environments of one factory differ" in findings(factory)


def test_a_factory_that_returns_the_same_object_twice_is_named() -> None:
    env = Pair()
    assert "share one Pair object" in findings(lambda: env)


def test_a_factory_of_another_type_is_refused_with_the_wrapper() -> None:
    assert "PettingZooWrapper(MyEnv())" in findings(object)


def test_an_instance_instead_of_a_factory_is_refused_with_the_factory() -> None:
    with pytest.raises(TypeError, match=r"lambda: Pair\(...\)"):
        check_env(Pair())  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_an_exception_is_a_finding_that_names_its_type(phase: Any) -> None:
    text = findings(lambda: CountingEnv(fault=Fault("raise", phase)))
    assert f"raised CountingError: fault in {phase}" in text


def test_is_closed_must_be_true_after_close() -> None:
    env = [Pair(), Pair()]

    def factory() -> Pair:
        pair = env.pop()
        pair.close = lambda: None  # type: ignore[method-assign]
        return pair

    assert "is_closed is False" in findings(factory)


def test_both_environments_are_closed_and_what_was_found_is_kept() -> None:
    class Stuck(Pair):  # type: ignore[misc]
        def close(self) -> None:
            raise OSError("in use")

    text = findings(lambda: Stuck(put("observation", 9.0)))
    assert "out of bounds" in text
    assert "close() raised OSError: in use" in text
    pair = Pair()
    built = iter([pair])
    assert "The factory raised StopIteration" in findings(lambda: next(built))
    assert pair.closed


@pytest.mark.parametrize("name", ["episodes", "steps"])
def test_nothing_to_play_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* at least 1, but is 0"):
        check_env(Pair, **{name: 0})


QUICK: Any = {"episodes": 2, "steps": 30}


class Walkers(BatchedEnv):
    """Two walkers per world; each may reach its goal before the other. Correct."""

    goal = 6

    def __init__(
        self, worlds: int = 4, *, dtype: Any = np.float32, **about: Any
    ) -> None:
        group = GroupDescription(
            ("w_0", "w_1"), spaces.Box(-20, 20, (2,), dtype), spaces.Discrete(3)
        )
        about = {"time_limit": 12} | about
        super().__init__(EnvDescription("walkers", {"w": group}, **about), worlds)
        self.at = np.zeros((worlds, 2), np.int64)

    def begin(self, which: Any, seeds: Any) -> Any:
        new = (seeds[:, None] >> np.array([0, 4])) % 5
        self.at = new if which is None else np.where(which[:, None], new, self.at)
        return {"w": self.look()}

    def advance(self, actions: Any) -> Step:
        self.move(actions["w"] - 1)
        arrived = np.abs(self.at) >= self.goal
        return Step({"w": self.look()}, {"w": arrived * 1.0}, {"w": arrived})

    def move(self, moves: Any) -> None:
        self.at = self.at + moves

    def look(self) -> Any:
        return np.stack([self.at, self.at[:, ::-1]], 2).astype(np.float32)


class Observes(Walkers):
    """Has a Tuple of an integer and an array as observation. Correct."""

    def __init__(self) -> None:
        super().__init__()
        space = spaces.Tuple(
            (spaces.Discrete(41), spaces.Box(-20, 20, (1,), np.float32))
        )
        group = GroupDescription(("w_0", "w_1"), space, spaces.Discrete(3))
        self._description = EnvDescription("walkers", {"w": group}, time_limit=12)

    def look(self) -> Any:
        return self.at + 20, self.at[..., None].astype(np.float32)


class Signs(Walkers):
    """May end as the next episode begins. Correct."""

    def look(self) -> Any:
        return np.sign(super().look())


def walkers(**methods: Any) -> type[Walkers]:
    """Return walkers with other methods."""
    return type("Wrong", (Walkers,), methods)


def moving(change: Callable[[Any, Any], Any]) -> type[Walkers]:
    """Return walkers whose moves depend on more than their actions."""
    return walkers(move=lambda env, moves: Walkers.move(env, change(env, moves)))


def begin_elsewhere(env: Any, which: Any, seeds: Any) -> Any:
    return Walkers.begin(env, which, seeds if which is None else np.roll(seeds, 1))


def keep_speed(env: Any, moves: Any) -> Any:
    """Have a state that `begin` leaves as it is."""
    env.speed = (getattr(env, "speed", 0) + moves) % 2
    return moves + env.speed


def keep_actions(env: Any, actions: Any) -> Step:
    """Move by the actions of the step before, but keep no copy of them."""
    late, env.before = getattr(env, "before", actions["w"]), actions["w"]
    return Walkers.advance(env, {"w": late})


def change_actions(env: Any, actions: Any) -> Step:
    actions["w"][:] = 1
    return Walkers.advance(env, actions)


def fail(env: Any, moves: Any) -> None:
    raise ZeroDivisionError("of the simulator")


class Shares(Walkers):
    """Keeps its state in the class."""

    kept: Any = None
    at = property(lambda _: Shares.kept, lambda _, at: setattr(Shares, "kept", at))


class ResetsBeforeItLooks(Walkers):
    """Resets itself, always to 0, and loses the last observation."""

    def __init__(self) -> None:
        super().__init__(repeats=False, time_limit=None)

    def begin(self, which: Any, seeds: Any) -> Any:
        return super().begin(which, seeds * 0)

    def advance(self, actions: Any) -> Step:
        step = super().advance(actions)
        terminated: Any = step.terminated
        over = terminated["w"].any(1)
        self.at[over] = 0
        return Step({"w": self.look()}, step.rewards, over)


class FailsLate(Walkers):
    """World `k` ends with step `3 * (k + 1)`. Nothing is wrong in the first 8 steps."""

    steps: Any = 0

    def begin(self, which: Any, seeds: Any) -> Any:
        self.steps = np.where(which is None or which, 0, self.steps)
        return super().begin(which, seeds)

    def advance(self, actions: Any) -> Step:
        step = super().advance(actions)
        self.steps = self.steps + np.ones(self.worlds, np.int64)
        if self.steps.max() > 8:
            raise ZeroDivisionError("of a late step")
        return Step(
            step.observations,
            step.rewards,
            self.steps == 3 * np.arange(1, self.worlds + 1),
        )


DRAWN = np.random.default_rng()
BEGINS_ALL = walkers(begin=lambda env, _, seeds: Walkers.begin(env, None, seeds))
BY_INDEX = moving(lambda env, moves: moves * (1 + np.arange(env.worlds) % 2)[:, None])
OVERFLOWS = walkers(look=lambda env: Walkers.look(env).astype(np.int64) + 200)
LEAVES = walkers(goal=40, move=lambda env, moves: Walkers.move(env, 0 * moves + 5))
WRONG_WORLDS: dict[Any, str] = {
    BEGINS_ALL: "changes worlds that are not in which",
    walkers(begin=begin_elsewhere): "does not begin the episode of its seed",
    moving(keep_speed): "more than their seeds and their actions: played again",
    BY_INDEX: "depend on the index of their world",
    moving(
        lambda _, moves: DRAWN.permutation(moves)
    ): "depend on more than their seeds",
    moving(lambda env, moves: moves + env.at.sum() % 2): "worlds that are not in which",
    walkers(advance=keep_actions): "read later, such as an array of actions",
    walkers(advance=change_actions): r"advance\(\) changes an array that it was given",
    Shares: "Two batches of one process change each other's episodes",
    ResetsBeforeItLooks: "equals the first one of the next episode",
    LEAVES: "world [0-9]: w/observation of w_0 is out of bounds",
    partial(OVERFLOWS, dtype=np.int8): "cannot hold the value 20",
    walkers(move=fail): "advance raised ZeroDivisionError: of the simulator",
}


@pytest.mark.parametrize(
    "make",
    [
        Walkers,
        partial(Walkers, 1),
        partial(Walkers, 70),
        partial(Walkers, done_on_any=True),
        Observes,
        partial(Signs, 20),
        partial(CountingWorlds, 3, action_mask=True, state=True, episode_reward=True),
        partial(CountingWorlds, 3, image=(4, 4, 3), done_on_any=True),
        partial(CountingWorlds, 3, resets_itself=True),
    ],
)
def test_correct_worlds_pass(make: Any) -> None:
    check_env(make, **QUICK)


@pytest.mark.parametrize(("make", "message"), WRONG_WORLDS.items())
def test_what_is_wrong_with_worlds_is_found(make: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_env(make, **QUICK)


def test_worlds_play_until_the_last_one_has_ended() -> None:
    with pytest.raises(ContractError, match="ZeroDivisionError: of a late step"):
        check_env(FailsLate, episodes=1, steps=30)


def test_batches_of_one_factory_have_equally_many_worlds() -> None:
    sizes = iter((2, 3))
    with pytest.raises(ContractError, match="batch sizes .2. and .3."):
        check_env(lambda: Walkers(next(sizes)), **QUICK)
