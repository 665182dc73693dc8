"""Drives an environment whose agents take turns (AEC).

A step of ours is one action of one agent. Afterwards PettingZoo wants every agent
that ended to be stepped with None; that happens within the same step, so that no
frame is spent on agents that cannot act. Only the agent whose turn it is observes;
the rows of the others keep what they saw last.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

from pettingzoo import AECEnv

from marl_collect.description import EnvDescription, Row
from marl_collect.envs.pettingzoo_actions import Actions
from marl_collect.envs.pettingzoo_groups import Place
from marl_collect.envs.pettingzoo_rows import Rows


@final
class TurnDriver:
    """Steps an ``AECEnv`` into the memory of one row."""

    def __init__(
        self,
        env: AECEnv[Any, Any, Any],
        description: EnvDescription,
        places: Sequence[Place],
        *,
        one_hot: bool,
    ) -> None:
        """Drive ``env``."""
        self._env = env
        self._description = description
        self._places = places
        self._one_hot = one_hot

    def bind(self, row: Row) -> None:
        """Work on ``row`` from now on."""
        self._rows = Rows(row, self._description, self._places)
        self._actions = Actions(row, self._places, one_hot=self._one_hot)

    def reset(self, seed: int) -> None:
        """Begin an episode.

        Raises:
            RuntimeError: if it is over before anyone acted.
        """
        env = self._env
        env.reset(seed=seed)
        self._rows.begin(env.agents, act=False)
        self._step_over_dead()
        if not env.agents:
            raise RuntimeError(
                f"{self._description.name}: reset(seed={seed}) left no agent that "
                "could act."
            )
        self._rows.inform(env.infos)
        self._next_turn()

    def step(self) -> None:
        """Step with the action of the agent whose turn it is."""
        rows = self._rows
        env = self._env
        if rows.leaving:
            rows.bury()
        agent = env.agent_selection
        env.step(self._actions.read(self._plan)[agent])
        if rows.buried:
            rows.revive(env.agents, env.terminations, env.truncations, act=False)
        rows.rewards.clear()
        rows.rewards.write(env.rewards, rows.buried)
        rows.inform(env.infos)
        rows.select(agent, acts=False)
        rows.roll_call(env.agents, env.terminations, env.truncations, act=False)
        self._step_over_dead()
        # Who was flagged, joined or came back when an agent that ended was taken out.
        if rows.buried:
            rows.revive(env.agents, env.terminations, env.truncations, act=False)
        rows.roll_call(env.agents, env.terminations, env.truncations, act=False)
        if rows.settle(over=not env.agents):
            self._write_state()
        else:
            self._next_turn()

    def audit(self) -> Iterable[str]:
        """Return nothing: agents that ended leave when it is their turn."""
        return ()

    def _step_over_dead(self) -> None:
        env = self._env
        rows = self._rows
        while env.agents:
            agent = env.agent_selection
            if not (env.terminations[agent] or env.truncations[agent]):
                return
            if agent not in rows.buried:
                rows.observe({agent: env.observe(agent)})
                rows.select(agent, acts=False)
            env.step(None)

    def _next_turn(self) -> None:
        agent = self._env.agent_selection
        if agent in self._rows.leaving:
            raise RuntimeError(
                f"{self._description.name}: the agent {agent} ended, came back and has "
                "its turn, all within one step, so its end cannot be recorded. Let it "
                "come back after an action of another agent."
            )
        self._rows.observe({agent: self._env.observe(agent)})
        self._rows.legal(self._env.infos, [agent])
        self._rows.select(agent, acts=True)
        self._plan = self._actions.plan([agent])
        self._write_state()

    def _write_state(self) -> None:
        if self._rows.wants_state:
            self._rows.state(self._env.state)
