"""Small PettingZoo environments that follow a script, to test wrappers.

Agents are ``agent_0``, ``agent_1``, .... The script defines in which step an agent ends
and why, and when it joins or returns. Agent ``i`` observes
``[i, steps so far, sum of its last action]`` as float32. Its reward is
``10 * i + steps``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


@dataclass(frozen=True)
class Script:
    """The events of an episode, and the spaces.

    Attributes:
        n_agents: number of possible agents.
        ends: by agent, the step in which it ends, counted from 1, and the reason:
            ``"terminated"``, ``"truncated"``, ``"both"``, or ``"vanished"`` for an
            agent that disappears without a flag.
        joins: by agent, the step after which it takes part; other agents take part
            from the reset. An agent may join and end in the same step.
        returns: by agent, the step after which it takes part again, after its end.
        waits: by agent, the steps after which a ``ScriptedEnv`` does not list it,
            although it did not end.
        lingers: agents that a ``ScriptedEnv`` lists after their ends too, with the same
            flags.
        max_cycles: step in which all remaining agents are truncated.
        action: action space of all agents, or spaces by agent.
        observation: observation space of all agents, or spaces by agent.
        observe: returns an observation from the agent's index, step and last action.
        info: returns an info from the agent's index and step.
    """

    n_agents: int = 3
    ends: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    joins: Mapping[str, int] = field(default_factory=dict)
    returns: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, Collection[int]] = field(default_factory=dict)
    lingers: Collection[str] = ()
    max_cycles: int = 10
    action: spaces.Space[Any] | dict[str, spaces.Space[Any]] = field(
        default_factory=lambda: spaces.Discrete(5)
    )
    observation: spaces.Space[Any] | dict[str, spaces.Space[Any]] = field(
        default_factory=lambda: spaces.Box(-np.inf, np.inf, (3,), np.float32)
    )
    observe: Callable[[int, int, Any], Any] | None = None
    info: Callable[[int, int], dict[str, Any]] | None = None

    @property
    def agents(self) -> list[str]:
        """Names of all possible agents."""
        return [f"agent_{i}" for i in range(self.n_agents)]

    def present(self, step: int) -> list[str]:
        """Return the agents that are listed after ``step``."""
        if step >= self.max_cycles:
            return []
        return [
            agent
            for agent in self.agents
            if self.joins.get(agent, 0) <= step
            and step not in self.waits.get(agent, ())
            and (
                agent not in self.ends
                or step < self.ends[agent][0]
                or agent in self.lingers
                or self.is_back(agent, step)
            )
        ]

    def is_back(self, agent: str, step: int) -> bool:
        """Return whether ``agent`` ended and takes part again after ``step``."""
        return agent in self.returns and step >= self.returns[agent]

    def arrives(self, agent: str, step: int) -> bool:
        """Return whether ``agent`` joins in ``step``."""
        return step > 0 and self.joins.get(agent, 0) == step

    def reason(self, agent: str, step: int) -> tuple[bool, bool]:
        """Return whether ``agent`` is terminated and truncated in ``step``."""
        end, why = self.ends.get(agent, (-1, ""))
        at_limit = step >= self.max_cycles
        if step != end and not (agent in self.lingers and step > end):
            return False, at_limit
        return why in ("terminated", "both"), why in ("truncated", "both") or at_limit

    def observation_of(self, agent: str, step: int, action: Any) -> Any:
        """Return the observation of ``agent`` after ``step``."""
        index = self.agents.index(agent)
        if self.observe is not None:
            return self.observe(index, step, action)
        total = 0.0 if action is None else float(np.sum(action))
        return np.array([index, step, total], dtype=np.float32)

    def info_of(self, agent: str, step: int) -> dict[str, Any]:
        """Return the info of ``agent`` after ``step``."""
        if self.info is None:
            return {}
        return self.info(self.agents.index(agent), step)


COMINGS_AND_GOINGS = Script(
    n_agents=4,
    ends={"agent_1": (2, "terminated"), "agent_3": (4, "vanished")},
    joins={"agent_2": 3},
    returns={"agent_1": 5},
)
"""Agents end, with and without a flag; one joins later, and one returns."""

SHORT_TURNS = Script(ends={"agent_1": (2, "terminated")}, max_cycles=4)
"""For agents that act in turns; one ends early."""


class _Spaces:
    """Methods that both kinds of environment share."""

    metadata = {"name": "scripted_v0", "render_modes": ["rgb_array"]}
    script: Script
    steps: int

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        space = self.script.observation
        return space[agent] if isinstance(space, dict) else space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        space = self.script.action
        return space[agent] if isinstance(space, dict) else space

    def state(self) -> Any:
        """Return an array with the number of steps, twice."""
        return np.array([self.steps, self.steps], dtype=np.float64)

    def render(self) -> Any:
        """Return an image whose brightness is the number of steps."""
        return np.full((4, 5, 3), self.steps, dtype=np.uint8)

    def close(self) -> None:
        """Do nothing."""


@final
class ScriptedEnv(_Spaces, ParallelEnv[str, Any, Any]):
    """All agents act in every step. ``received`` has the actions of each step."""

    def __init__(
        self, script: Script | None = None, render_mode: str | None = None
    ) -> None:
        self.script = script or Script()
        self.render_mode = render_mode
        self.possible_agents = self.script.agents
        self.agents: list[str] = []
        self.received: list[dict[str, Any]] = []
        self.steps = 0

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.steps = 0
        self.received.clear()
        self.agents = self.script.present(0)
        return self._look({}, self.agents), self._infos(self.agents)

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], Any]:
        if sorted(actions) != sorted(self.agents):
            raise ValueError(
                f"Expected actions of {self.agents}, but got those of {list(actions)}."
            )
        self.received.append(actions)
        self.steps += 1
        actors = self.agents
        self.agents = self.script.present(self.steps)
        # Results name agents that joined, but not agents that vanished.
        ends = self.script.ends
        returned_agents = [a for a in actors if ends.get(a, (0, ""))[1] != "vanished"]
        returned_agents += [*self.agents]
        returned_agents = [
            agent
            for agent in self.script.agents
            if agent in returned_agents or self.script.arrives(agent, self.steps)
        ]
        reasons = {a: self.script.reason(a, self.steps) for a in returned_agents}
        order = self.script.agents
        rewards = {agent: 10.0 * order.index(agent) + self.steps for agent in actors}
        return (
            self._look(actions, returned_agents),
            rewards,
            {agent: reason[0] for agent, reason in reasons.items()},
            {agent: reason[1] for agent, reason in reasons.items()},
            self._infos(returned_agents),
        )

    def _look(self, actions: Mapping[str, Any], agents: list[str]) -> dict[str, Any]:
        script, step = self.script, self.steps
        return {a: script.observation_of(a, step, actions.get(a)) for a in agents}

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {agent: self.script.info_of(agent, self.steps) for agent in agents}


@final
class ScriptedTurns(_Spaces, AECEnv[str, Any, Any]):
    """Agents take turns; a step is the action of one agent.

    ``received`` has agent and action of each call of ``step``. ``observed`` has the
    agent of each call of ``observe``.
    """

    def __init__(
        self, script: Script | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__()
        self.script = script or Script()
        self.render_mode = render_mode
        self.possible_agents = self.script.agents
        self.received: list[tuple[str, Any]] = []
        self.observed: list[str] = []
        self.steps = 0

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.steps = 0
        self.received.clear()
        self.observed.clear()
        self.agents = self.script.present(0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: self.script.info_of(agent, 0) for agent in self.agents}
        self._last: dict[str, Any] = {}
        self.agent_selection = self.agents[0]

    def observe(self, agent: str) -> Any:
        """Return the current observation of ``agent``."""
        self.observed.append(agent)
        return self.script.observation_of(agent, self.steps, self._last.get(agent))

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        self.received.append((agent, action))
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.steps += 1
        self._last[agent] = action
        self._cumulative_rewards[agent] = 0
        for other in self.agents:
            self.rewards[other] = 10.0 * self.script.agents.index(other) + self.steps
        present = self.script.present(self.steps)
        for other in self.script.agents:
            arrives = other in present or self.script.arrives(other, self.steps)
            if arrives and other not in self.agents:
                self._welcome(other)
        for other in self.agents:
            reason = self.script.reason(other, self.steps)
            self.terminations[other], self.truncations[other] = reason
            self.infos[other] = self.script.info_of(other, self.steps)
        self._accumulate_rewards()
        self.agent_selection = self._following(agent)
        self._deads_step_first()

    def _following(self, agent: str) -> str:
        """Return the next living agent after ``agent``."""
        start = self.agents.index(agent) + 1
        order = self.agents[start:] + self.agents[:start]
        alive = [a for a in order if not (self.terminations[a] or self.truncations[a])]
        return alive[0] if alive else agent

    def _welcome(self, agent: str) -> None:
        self.agents.append(agent)
        self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
        self.terminations[agent] = self.truncations[agent] = False
        self.infos[agent] = {}


class Countdown:
    """Has lists of agents. All end after 3 steps; if ``alone``, each after ``2 + i``.

    Ends are terminations, or truncations if ``cut``.
    """

    def __init__(
        self, n: int = 3, *, alone: bool = True, single: bool = False, cut: bool = False
    ) -> None:
        box = spaces.Box(-9, 99, (2,), np.float32)
        self.observation_space: Any = spaces.Tuple([box] * n)
        self.action_space: Any = [spaces.Discrete(4, start=1)] * n
        self.n, self.alone, self.single, self.cut = n, alone, single, cut
        self.taken: list[Any] = []

    def reset(self, seed: int | None = None) -> Any:
        self.steps, self.start = 0, (seed or 0) % 7
        return self._look(), {}

    def step(self, actions: Any) -> Any:
        self.taken = [int(action) for action in actions]
        self.steps += 1
        ends = [self.steps >= (2 + i if self.alone else 3) for i in range(self.n)]
        if self.single:
            return self._look(), 1.5, ends[0], False, {"level": self.steps}
        infos = [{"level": i} for i in range(self.n)]
        flags = (ends, [False] * self.n)
        return self._look(), np.arange(self.n), *flags[:: -1 if self.cut else 1], infos

    def close(self) -> None:
        """Nothing to close."""

    def _look(self) -> list[Any]:
        return [np.array([i + self.start, self.steps]) for i in range(self.n)]


def altered(raw: Any, **changes: Callable[[Any], Any]) -> Any:
    """Return ``raw`` with methods whose results are changed, such as ``step``.

    A change gets the result. It changes it in place, or returns another one.
    """
    for name, change in changes.items():
        setattr(raw, name, partial(_changed, getattr(raw, name), change))
    return raw


def _changed(method: Any, change: Any, *args: Any, **keywords: Any) -> Any:
    result = method(*args, **keywords)
    other = change(result)
    return result if other is None else other
