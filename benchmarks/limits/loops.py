"""An environment stepped by its library's own loop, and by our adapter."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from marl_collect.core.description import allocate
from marl_collect.core.env import MultiAgentEnv

N_ACTIONS = 256
"""Joint actions drawn beforehand; loops take them in turn."""

Acts = Mapping[str, Any]
"""A forward pass per group, or nothing to take the actions that were drawn."""


class Loop(Protocol):
    """One way of stepping an environment."""

    @property
    def over(self) -> bool:
        """Whether the next call must be ``reset``."""

    def reset(self, seed: int) -> None:
        """Begin an episode."""

    def step(self, number: int) -> None:
        """Step with the joint action of this number, or with the policy's."""


class OurLoop:
    """Our environment, driven as a worker drives it.

    Attributes:
        row: all that it reads and writes, by key.
    """

    def __init__(
        self,
        env: MultiAgentEnv,
        actions: list[dict[str, Any]],
        acts: Acts | None = None,
    ) -> None:
        """Bind it to memory of its own."""
        self._env = env
        self.row = allocate(env.description.row())
        self._done = self.row["done",]
        self._done[0] = True
        self._actions = [
            [(self.row[group, "action"], array) for group, array in joint.items()]
            for joint in actions
        ]
        self._acts = [
            (act, self.row[group, "observation"], self.row[group, "action"])
            for group, act in (acts or {}).items()
        ]
        env.bind(self.row)

    @property
    def over(self) -> bool:
        """Whether the episode ended."""
        return bool(self._done[0])

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        self._env.reset_row(seed)

    def step(self, number: int) -> None:
        """Step with the joint action of this number, or with the policy's."""
        if self._acts:
            for act, observed, action in self._acts:
                action[...] = act(observed)
        else:
            for target, array in self._actions[number]:
                target[...] = array
        self._env.step_row()


class PettingZooLoop:
    """``parallel_env()`` and its dicts, as PettingZoo's documentation steps it."""

    def __init__(
        self,
        env: Any,
        actions: list[dict[str, Any]],
        group_map: Mapping[str, Sequence[str]],
        acts: Acts | None = None,
    ) -> None:
        """Take an environment that is not reset yet."""
        self._env = env
        self._begun = False
        self._actions = [
            {
                agent: joint[group][row]
                for group, agents in group_map.items()
                for row, agent in enumerate(agents)
            }
            for joint in actions
        ]
        self._acts = [
            (list(group_map[group]), act) for group, act in (acts or {}).items()
        ]
        self._observations: dict[str, Any] = {}

    @property
    def over(self) -> bool:
        """Whether the episode ended."""
        return not (self._begun and self._env.agents)

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        self._begun = True
        self._observations, _ = self._env.reset(seed=seed)

    def step(self, number: int) -> None:
        """Step with the joint action of this number, or with the policy's."""
        env = self._env
        if self._acts:
            actions = self._acting()
        else:
            joint = self._actions[number]
            actions = {agent: joint[agent] for agent in env.agents}
        self._observations, *_ = env.step(actions)

    def _acting(self) -> dict[str, Any]:
        observations = self._observations
        actions: dict[str, Any] = {}
        for agents, act in self._acts:
            observed = np.stack([observations[agent] for agent in agents])
            actions |= zip(agents, act(observed), strict=True)
        return actions


class MeltingpotLoop:
    """A substrate that MeltingPot built, stepped with a list of actions."""

    def __init__(self, env: Any, actions: list[dict[str, Any]]) -> None:
        """Take a substrate that is not reset yet."""
        self._env = env
        self._actions = [joint["agents"].tolist() for joint in actions]
        self._timestep: Any = None

    @property
    def over(self) -> bool:
        """Whether the next call must be ``reset``."""
        return self._timestep is None or self._timestep.last()

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        del seed  # MeltingPot takes none
        self._timestep = self._env.reset()

    def step(self, number: int) -> None:
        """Step with the joint action of this number."""
        self._timestep = self._env.step(self._actions[number])
