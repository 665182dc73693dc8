"""Writes rewards, and their sums over an episode, into the memory of one row."""

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import numpy as np

from marl_collect.core.description import EnvDescription, Row
from marl_collect.envs.pettingzoo.groups import AgentSpec
from marl_collect.envs.pettingzoo.writers import Array, unknown


@final
class Rewards:
    """The rewards of one environment's agents."""

    def __init__(
        self, row: Row, description: EnvDescription, specs: Sequence[AgentSpec]
    ) -> None:
        """Write to ``row``, float32."""
        groups = description.groups
        self._rows = [row[group, "reward"] for group in groups]
        # Plain memory takes a number in a third of the time that NumPy takes.
        memory: dict[str, Any] = {
            group: memoryview(row[group, "reward"][:, 0])  # type: ignore[arg-type]
            for group in groups
        }
        self._specs = {spec.agent: (memory[spec.group], spec.row) for spec in specs}
        # One call writes all rewards where they stand in the order of the agents.
        self._memory = next(iter(memory.values()))
        self._agents = [spec.agent for spec in sorted(specs, key=lambda p: p.row)]
        self._in_order = len(groups) == 1 and self._memory.contiguous
        self._pack = struct.Struct(f"{len(specs)}f").pack_into
        self._totals: list[tuple[Array, Array, Array]] = [
            (
                row[group, "reward"],
                row[group, "episode_reward"],
                np.zeros((g.n_agents, 1)),
            )
            for group, g in groups.items()
            if g.episode_reward
        ]

    def begin(self) -> None:
        """Sum up a new episode."""
        for _, _, total in self._totals:
            total.fill(0)

    def write(self, rewards: Mapping[Any, Any], absent: Collection[Any]) -> None:
        """Write the rewards of this step; agents without one get 0.

        Args:
            rewards: agent to its reward.
            absent: agents that get none, whatever ``rewards`` says.

        Raises:
            ValueError: naming an agent that there is not, or whose reward is no
                number.
        """
        if not absent and self._in_order and [*rewards] == self._agents:
            try:
                self._pack(self._memory, 0, *rewards.values())
            except (struct.error, TypeError, ValueError):
                self._write_each(rewards, absent)  # It says whose is no number.
        else:
            self._write_each(rewards, absent)
        for step, total_row, total in self._totals:
            total += step
            total_row[...] = total

    def clear(self) -> None:
        """Write zeros."""
        for row in self._rows:
            row.fill(0)

    def _write_each(self, rewards: Mapping[Any, Any], absent: Collection[Any]) -> None:
        if absent or len(rewards) < len(self._agents):
            self.clear()
        for agent, reward in rewards.items():
            if agent not in absent:
                if agent not in self._specs:
                    raise unknown(agent, self._specs)
                memory, index = self._specs[agent]
                try:
                    memory[index] = reward
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"The reward of agent {agent} must be a number, but is "
                        f"{reward!r}."
                    ) from error
