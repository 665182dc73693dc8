"""Agents that an environment does not list although they did not end: dead or waiting.

Environments written for RLlib list in ``agents`` only those that act next.
"""

import re
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv
from support.zoo import Script, ScriptedEnv
from zoo_tools import BoundEnv

from marl_collect import Collector, MarlGroupMapType, RandomPolicy
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import check_env

torch = pytest.importorskip("torch")

LENGTH = 6
PLAYERS = ["one", "two", "three"]
IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP


def legal_of(player: str, steps: int) -> np.ndarray:
    """Return a mask of four actions, one of which is illegal."""
    mask = np.ones(4, np.int8)
    mask[(PLAYERS.index(player) + steps) % 4] = 0
    return mask


class _Table:
    """Three players in turn; ``agents`` has only the one that acts next.

    A player observes the number of steps. The player that acted gets the number of its
    action, and 10 if another one acted. The last step terminates everybody.
    """

    metadata = {"name": "table_v0"}
    possible_agents = PLAYERS

    def __init__(self, *, masks: str = "") -> None:
        self.masks = masks
        self.acted: list[tuple[str, int]] = []

    def observation_space(self, agent: str) -> Any:
        steps = spaces.Box(0, LENGTH, (1,), np.float32)
        if self.masks != "observation":
            return steps
        return spaces.Dict({"steps": steps, "action_mask": spaces.MultiBinary(4)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def turn(self) -> str:
        return PLAYERS[self.steps % 3]

    def look(self, player: str) -> Any:
        steps = np.array([self.steps], np.float32)
        if self.masks != "observation":
            return steps
        return {"steps": steps, "action_mask": legal_of(player, self.steps)}

    def tell(self, player: str) -> dict[str, Any]:
        if self.masks != "info":
            return {}
        return {"action_mask": legal_of(player, self.steps)}

    def begin(self) -> None:
        self.steps = 0
        self.acted = []
        self.agents = [self.turn()]

    def play(self, player: str, action: Any) -> dict[str, float]:
        if self.masks:
            assert legal_of(player, self.steps)[action], "an illegal action"
        self.acted.append((player, int(action)))
        self.steps += 1
        return {p: float(action) if p == player else 10.0 for p in PLAYERS}

    @property
    def over(self) -> bool:
        return self.steps == LENGTH

    def close(self) -> None:
        pass


class Together(_Table, ParallelEnv):
    """Returns only the next player's observation, as RLlib's environments do."""

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.begin()
        (player,) = self.agents
        return {player: self.look(player)}, {player: self.tell(player)}

    def step(self, actions: dict[str, Any]) -> Any:
        ((player, action),) = actions.items()
        rewards = self.play(player, action)
        following = PLAYERS if self.over else [self.turn()]
        self.agents = [] if self.over else following
        return (
            {p: self.look(p) for p in following},
            rewards,
            dict.fromkeys(following, self.over),
            dict.fromkeys(following, False),
            {p: self.tell(p) for p in following},
        )


class InTurn(_Table, AECEnv):
    """The same game, turn-based."""

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.begin()
        self.agent_selection = self.turn()
        self.rewards = dict.fromkeys(PLAYERS, 0.0)
        self._cumulative_rewards = dict.fromkeys(PLAYERS, 0.0)
        self.terminations = dict.fromkeys(PLAYERS, False)
        self.truncations = dict.fromkeys(PLAYERS, False)
        self.infos = {p: self.tell(p) for p in PLAYERS}

    def observe(self, agent: str) -> Any:
        return self.look(agent)

    def step(self, action: Any) -> None:
        player = self.agent_selection
        if self.terminations[player]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[player] = 0.0
        self.rewards = self.play(player, action)
        self._accumulate_rewards()
        self.infos = {p: self.tell(p) for p in PLAYERS}
        self.terminations = dict.fromkeys(PLAYERS, self.over)
        self.agent_selection = self.turn()
        self.agents = PLAYERS[:] if self.over else [self.turn()]


STYLES = pytest.mark.parametrize("style", [Together, InTurn])


def waiting(style: Any, *, masks: str = "", **keywords: Any) -> PettingZooWrapper:
    keywords = {"group_map": IN_ONE, "absent": "waiting", **keywords}
    return PettingZooWrapper(style(masks=masks), **keywords)


@STYLES
@pytest.mark.parametrize("done_on_any", [None, False])
def test_players_that_are_not_listed_wait(style: Any, done_on_any: Any) -> None:
    env = BoundEnv(waiting(style, done_on_any=done_on_any, agent_ids=True))
    for step in range(LENGTH):
        turn = step % 3
        assert env["agents", "mask"].tolist() == [p == turn for p in range(3)]
        assert env.flags("agents") == [[False] * 3] * 3
        assert env.flags() == [[False]] * 3
        # The last step that each player has seen, and its one-hot identity.
        seen = [
            max((s for s in range(step + 1) if s % 3 == p), default=0) for p in range(3)
        ]
        expected = [[seen[p], *np.eye(3)[p]] for p in range(3)]
        assert env["agents", "observation"].tolist() == expected
        env.step(agents=[1, 2, 3])
        rewards = [turn + 1 if p == turn else 10 for p in range(3)]
        assert env["agents", "reward"].ravel().tolist() == rewards
    assert env.env.env.acted == [(PLAYERS[s % 3], s % 3 + 1) for s in range(LENGTH)]
    assert env.flags() == [[True], [True], [False]]
    assert env.flags("agents") == [[True] * 3, [True] * 3, [False] * 3]
    assert env["agents", "observation"][:, 0].tolist() == [LENGTH] * 3
    assert not env["agents", "mask"].any()


@STYLES
@pytest.mark.parametrize("masks", ["", "observation", "info"])
def test_the_contract_holds_and_actions_are_legal(style: Any, masks: str) -> None:
    check_env(lambda: waiting(style, masks=masks, episode_reward=True))
    with Collector(
        lambda: waiting(style, masks=masks),
        RandomPolicy(),
        frames_per_batch=4 * LENGTH,
        seed=3,
    ) as collector:
        batch = collector.next()[0]
    ends = batch["next", "done"].ravel().nonzero().ravel().tolist()
    assert ends == [LENGTH - 1 + LENGTH * k for k in range(4)]
    assert batch["collector", "traj_ids"].unique().numel() == 4
    assert batch["agents", "mask"].sum(-1).tolist() == [1] * 4 * LENGTH
    if masks:
        legal = batch["agents", "action_mask"]
        acts = batch["agents", "mask"]
        assert legal[~acts].all()
        assert (~legal[acts]).sum() == 4 * LENGTH


@STYLES
def test_the_default_warns_once_that_players_come_back(style: Any) -> None:
    env = BoundEnv(PettingZooWrapper(style(), group_map=IN_ONE, done_on_any=False))
    env.step()
    env.step()
    message = (
        "table_v0: one was recorded as dead, because it left env.agents without a "
        "termination or truncation, but it came back. If agents that are missing only "
        "wait, pass absent='waiting'."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        env.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            env.step()
        env.env.reset_row(4)
        for _ in range(LENGTH):
            env.step()


def test_the_default_warns_once_that_a_missing_player_ended_the_episode() -> None:
    env = BoundEnv(PettingZooWrapper(Together(), group_map=IN_ONE))
    message = (
        "table_v0: one left env.agents without a termination or truncation, which "
        "ended the episode. If agents that are missing only wait, pass "
        "absent='waiting'."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        env.step()
    assert env.flags() == [[True], [False], [True]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.env.reset_row(4)
        env.step()
    assert env.flags() == [[True], [False], [True]]


@pytest.mark.parametrize("done_on_any", [True, False])
def test_an_agent_that_ended_is_no_reason_to_warn(*, done_on_any: bool) -> None:
    ends = {"agent_1": (1, "terminated"), "agent_2": (2, "vanished")}
    script = Script(ends=ends, returns={"agent_1": 3}, max_cycles=4)
    env = BoundEnv(PettingZooWrapper(ScriptedEnv(script), done_on_any=done_on_any))
    for _ in range(4):
        env.step()
        if env["done"][0]:
            env.env.reset_row(0)


def test_all_actions_of_an_agent_that_waits_are_legal_whatever_is_returned() -> None:
    raw = Together(masks="observation")
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, absent="waiting"))
    step = raw.step

    def show_everybody(actions: Any) -> Any:
        _, *results = step(actions)
        raw.agents = ["two"]
        return ({p: raw.look(p) for p in PLAYERS}, *results)

    raw.step = show_everybody  # type: ignore[method-assign]
    for steps in (1, 2, 3):
        env.step(agents=[1, (steps + 2) % 4, 0])
        assert env["agents", "mask"].tolist() == [False, True, False]
        legal = env["agents", "action_mask"]
        assert legal[1].tolist() == legal_of("two", steps).astype(bool).tolist()
        assert legal[[0, 2]].all()
        assert env["agents", "observation", "steps"].tolist() == [[steps]] * 3


def test_an_agent_that_is_dead_after_the_reset_does_not_wait() -> None:
    raw = InTurn()
    reset = raw.reset

    def dead(seed: Any = None, options: Any = None) -> None:
        reset(seed)
        raw.agents = ["one", "two"]
        raw.terminations["one"] = True
        raw._skip_agent_selection = "two"

    raw.reset = dead  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, absent="waiting"))
    raw._accumulate_rewards = lambda: None
    env.step()
    assert env["agents", "reward"].ravel().tolist() == [0, 0, 10]


def test_an_episode_ends_when_nobody_is_listed() -> None:
    raw = Together()
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, absent="waiting"))
    step = raw.step

    def stop(actions: Any) -> Any:
        results = step(actions)
        raw.agents = []
        return results

    raw.step = stop  # type: ignore[method-assign]
    env.step()
    assert env.flags() == [[True], [False], [True]]
    assert env.flags("agents") == [[True] * 3, [False] * 3, [True] * 3]


@pytest.mark.parametrize("absent", ["dead", "waiting"])
def test_a_reset_that_lists_nobody_is_an_error(absent: Any) -> None:
    raw = Together()
    env = PettingZooWrapper(raw, group_map=IN_ONE, absent=absent)
    reset = raw.reset

    def forget(*args: Any, **keywords: Any) -> Any:
        results = reset(*args, **keywords)
        raw.agents = []
        return results

    raw.reset = forget  # type: ignore[method-assign]
    message = r"table_v0: .* env.agents is empty. reset\(\) must begin with self.agents"
    with pytest.raises(RuntimeError, match=message):
        env.rollout(3)


def test_other_values_and_a_missing_mask_are_refused() -> None:
    with pytest.raises(ValueError, match=r"absent must be 'dead' or 'waiting', but is"):
        PettingZooWrapper(Together(), absent="asleep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"table_v0: absent='waiting' needs use_mask"):
        PettingZooWrapper(Together(), absent="waiting", use_mask=False)
