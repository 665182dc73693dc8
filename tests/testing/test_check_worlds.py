"""``check_env`` finds what is wrong with simulators of many worlds."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.worlds import CountingWorlds

from marl_collect import (
    BatchedEnv,
    ContractError,
    EnvDescription,
    GroupDescription,
    Step,
    check_env,
)

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


class BeginsAll(Walkers):
    def begin(self, which: Any, seeds: Any) -> Any:
        return super().begin(None, seeds)


class BeginsElsewhere(Walkers):
    def begin(self, which: Any, seeds: Any) -> Any:
        if which is None:
            return super().begin(None, seeds)
        return super().begin(which, np.roll(seeds, 1))


class KeepsSpeed(Walkers):
    """Has a state that `begin` leaves as it is."""

    speed: Any = 0

    def move(self, moves: Any) -> None:
        self.speed = (self.speed + moves) % 2
        super().move(moves + self.speed)


class DependsOnIndex(Walkers):
    def move(self, moves: Any) -> None:
        super().move(moves * (1 + np.arange(self.worlds) % 2)[:, None])


class Draws(Walkers):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng()

    def move(self, moves: Any) -> None:
        super().move(self.random.permutation(moves))


class CrossTalk(Walkers):
    def move(self, moves: Any) -> None:
        super().move(moves + (self.at.sum() % 2))


class KeepsActions(Walkers):
    """Moves by the actions of the step before, but keeps no copy of them."""

    before: Any = None

    def advance(self, actions: Any) -> Step:
        late = actions["w"] if self.before is None else self.before
        self.before = actions["w"]
        return super().advance({"w": late})


class ChangesActions(Walkers):
    def advance(self, actions: Any) -> Step:
        actions["w"][:] = 1
        return super().advance(actions)


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


class LeavesItsSpace(Walkers):
    goal = 40

    def move(self, moves: Any) -> None:
        super().move(5 * np.ones_like(moves))


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


class Overflows(Walkers):
    def __init__(self) -> None:
        super().__init__(dtype=np.int8)

    def look(self) -> Any:
        return super().look().astype(np.int64) + 200


class Raises(Walkers):
    def move(self, moves: Any) -> None:
        raise ZeroDivisionError("of the simulator")


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (BeginsAll, "changes worlds that are not in which"),
        (BeginsElsewhere, "does not begin the episode of its seed"),
        (KeepsSpeed, "depend on more than their seeds and their actions: played again"),
        (DependsOnIndex, "depend on the index of their world"),
        (Draws, "depend on more than their seeds"),
        (CrossTalk, "changes worlds that are not in which"),
        (KeepsActions, "read later, such as an array of actions"),
        (ChangesActions, r"advance\(\) changes an array that it was given"),
        (ResetsBeforeItLooks, "equals the first one of the next episode"),
        (LeavesItsSpace, "world [0-9]: w/observation of w_0 is out of bounds"),
        (Overflows, "cannot hold the value 20"),
        (Raises, "advance raised ZeroDivisionError: of the simulator"),
    ],
)
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
