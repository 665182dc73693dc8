"""Writes rewards, and their sums over an episode, to one row."""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from marl_collect.core.description import EnvDescription, Row
from marl_collect.envs.pettingzoo.groups import AgentSpec
from marl_collect.envs.pettingzoo.writers import Array, unknown_agent


@final
class Rewards:
    """Writes the rewards of one environment's agents."""

    def __init__(
        self, row: Row, description: EnvDescription, specs: Sequence[AgentSpec]
    ) -> None:
        """Write float32 rewards to ``row``."""
        groups = description.groups
        self._rows = [row[group, "reward"] for group in groups]
        # Assigning a number to a memoryview takes a third of NumPy's time.
        memory: dict[str, Any] = {
            group: memoryview(row[group, "reward"][:, 0])  # type: ignore[arg-type]
            for group in groups
        }
        self._specs = {spec.agent: (memory[spec.group], spec.row) for spec in specs}
        # A single call writes all rewards if their memory is in agent order.
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
        """Reset the sums for a new episode."""
        for _, _, total in self._totals:
            total.fill(0)

    def write(self, rewards: Mapping[Any, Any], absent: Collection[Any]) -> None:
        """Write the rewards of this step; agents without a reward get 0.

        Args:
            rewards: agent to reward.
            absent: agents whose rewards are ignored.

        Raises:
            ValueError: if an agent is unknown or its reward is not a number; names the
                agent.
        """
        if not absent and self._in_order and [*rewards] == self._agents:
            try:
                self._pack(self._memory, 0, *rewards.values())
            except (struct.error, TypeError, ValueError, OverflowError):
                self._write_each(
                    rewards, absent
                )  # raises an error that names the agent
        else:
            self._write_each(rewards, absent)
        for step, total_row, total in self._totals:
            total += step
            total_row[...] = total

    def by_agent(self) -> Iterator[tuple[Any, float]]:
        """Yield each agent and its reward of this step, as written."""
        for agent, (memory, index) in self._specs.items():
            yield agent, float(memory[index])

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
                    raise unknown_agent(agent, self._specs)
                memory, index = self._specs[agent]
                try:
                    memory[index] = reward
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(
                        f"The reward of agent {agent} must be a number, but is "
                        f"{reward!r}."
                    ) from error
