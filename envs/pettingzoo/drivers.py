"""Steps PettingZoo environments: agents that act simultaneously, or in turn (AEC).

A step of a turn-based environment is one action of one agent. PettingZoo requires that
every agent that is done is then stepped with None. This happens within the same step,
so that no frame is spent on agents that cannot act. Only the agent whose turn it is
observes; the rows of the others keep their last observations.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from pettingzoo import AECEnv

from marl_collect.envs.pettingzoo.actions import Actions, Plan
from marl_collect.envs.pettingzoo.description import as_list, check_reset
from marl_collect.envs.pettingzoo.fast_path import ParallelWorld
from marl_collect.envs.pettingzoo.rows import Rows

_LATER = 20
"""Steps after an episode in which ``audit`` looks for agents that come back."""
_RESULTS = ("observation", "reward", "termination", "truncation", "info")
_TOLERANCE = 1e-4
"""Relative difference of sums of float32 rewards that is no finding."""


@final
class ParallelDriver:
    """Steps a ``ParallelEnv`` into the memory of one row."""

    def __init__(self, env: ParallelWorld, name: str) -> None:
        """Step ``env``, called ``name`` in errors; ``bind`` provides the row."""
        self._env = env
        self._name = name
        self._first_infos: Mapping[Any, Any] = {}
        self._agents: list[Any] = []
        self._plan: Plan = ()
        self._returned: tuple[Mapping[Any, Any], ...] = ()
        self._acted: Mapping[Any, Any] = {}

    def bind(self, rows: Rows, actions: Actions) -> None:
        """From now on, read ``actions`` and write to ``rows``."""
        self._rows = rows
        self._actions = actions

    def reset(self, seed: int, options: Mapping[str, Any]) -> None:
        """Begin an episode.

        Args:
            seed: of the reset.
            options: further keywords of the reset.

        Raises:
            RuntimeError: if the reset lists no agent.
        """
        rows = self._rows
        observations, infos = check_reset(self._env.reset(seed=seed, **options))
        self._returned = (observations,)
        self._first_infos = infos
        self._agents = as_list(self._env.agents, self._name)[:]
        if not self._agents:  # With absent="waiting" too: an empty list ends episodes.
            raise RuntimeError(
                f"{self._name}: at least one agent must be able to act after "
                f"reset(seed={seed}), but env.agents is empty. reset() must begin with "
                "self.agents = self.possible_agents[:]."
            )
        rows.begin(self._agents, act=True)
        self._plan = self._actions.plan(self._agents)
        rows.write_observations(observations)
        if rows.takes_infos:
            rows.take_infos(infos, self._agents)
        if rows.wants_state:
            rows.write_state(self._env.state)

    def step(self) -> None:
        """Step with the row's actions."""
        rows = self._rows
        env = self._env
        if rows.leaving or rows.has_limit:
            rows.begin_frame()
        self._acted = actions = self._actions.read(self._plan)
        self._returned = returned = env.step(actions)
        present = env.agents
        if present.__class__ is not list:
            present = as_list(present, self._name)
        try:
            observations, rewards, terminations, truncations, infos = returned
            # Most steps end no agent, and the flags are False already.
            changed = (
                rows.at_limit
                or rows.waiting
                or present != self._agents
                or True in terminations.values()
                or True in truncations.values()
            )
            for mapping in (observations, rewards, infos):  # Some return lists or None.
                mapping.values()
        except (TypeError, ValueError, AttributeError) as error:
            raise self._wrong_result(returned) from error
        if rows.dead:
            rows.revive(present, terminations, truncations, act=True)
        if changed:
            rows.join_new(present, terminations, truncations, act=True)
        rows.write_observations(observations)
        rows.rewards.write(rewards, rows.absent)
        if rows.takes_infos:
            rows.take_infos(infos, present)
        if changed:
            self._change(present, terminations, truncations)
        if rows.wants_state:
            rows.write_state(env.state)

    def _change(self, present: list[Any], *ends: Mapping[Any, Any]) -> None:
        """Write who ended, who acts next, and whether the episode is over."""
        rows = self._rows
        rows.check_flags(*ends)
        self._agents = present[:]
        self._plan = self._actions.plan(self._agents)
        rows.record_ends(self._agents, *ends)
        if rows.absent_wait:
            rows.select_present(self._agents)
        rows.settle(over=not self._agents)

    def audit(self) -> Iterator[str]:
        """Yield what is wrong with the results of the last reset or step."""
        rows = self._rows
        present = as_list(self._env.agents, self._name)
        for agent in present:
            if agent in rows.leaving or agent in rows.dead:
                yield f"{agent} is done, but env.agents still lists it."
                continue
            for name, result in zip(_RESULTS, self._returned, strict=False):
                due = agent in self._acted or name == "observation"
                if due and agent not in result:
                    yield f"env.agents lists {agent}, but it has no {name}."
        stepped = len(self._returned) == len(_RESULTS)
        infos = self._returned[-1] if stepped else self._first_infos
        yield from rows.without_mask(infos, present)
        if stepped:
            yield from rows.unknown_flags(*self._returned[2:4])
        if rows.unflagged and present and rows.is_over:
            rows.came_back |= self._listed_later(rows.unflagged)
        yield from rows.take_returns()

    def _listed_later(self, missing: Collection[Any]) -> set[Any]:
        """Play on after the end, and return which of ``missing`` come back.

        A reset must follow.
        """
        # The actions are those of the row, which may be illegal by now.
        with suppress(Exception):
            for _ in range(_LATER):
                present = as_list(self._env.agents, self._name)
                back = {agent for agent in present if agent in missing}
                if back or not present:
                    return back
                self._env.step(self._actions.read(self._actions.plan(present)))
        return set()

    def _wrong_result(self, returned: Any) -> TypeError:
        return TypeError(
            f"{self._name}: step() must return five mappings by agent "
            f"({', '.join(_RESULTS)}), but returned {returned!r:.200}"
        )


@final
class AECDriver:
    """Steps an ``AECEnv`` into the memory of one row."""

    def __init__(self, env: AECEnv[Any, Any, Any], name: str) -> None:
        """Step ``env``, called ``name`` in errors; ``bind`` provides the row."""
        self._env = env
        self._name = name
        # Whether env.rewards was seen to be in use, which is checked until it is.
        self._rewarded = False
        # Calls of step(None) since the last one that changed env.agents.
        self._ignored = 0
        # Each agent's rewards since its last turn, once audit() is in use.
        self._sums: dict[Any, float] | None = None

    def bind(self, rows: Rows, actions: Actions) -> None:
        """From now on, read ``actions`` and write to ``rows``."""
        self._rows = rows
        self._actions = actions

    def reset(self, seed: int, options: Mapping[str, Any]) -> None:
        """Begin an episode; ``options`` are further keywords of the reset.

        Raises:
            RuntimeError: if the reset leaves no agent alive, or if an agent that is
                dead is not removed.
        """
        env = self._env
        self._ignored = 0
        if self._sums is not None:
            self._sums = {}
        env.reset(seed=seed, **options)
        self._read()
        # Agents that are dead now take no part: after a reset no flag may be True.
        dead = []
        while self._agents and self._is_dead(self._agent):
            dead.append(self._agent)
            self._step_dead()
        self._rows.begin(self._agents, act=False, dead=dead)
        if not self._agents:
            raise RuntimeError(
                f"{self._name}: at least one agent must be able to act "
                f"after reset(seed={seed}), but none is alive."
            )
        self._rows.write_infos(env.infos)
        self._next_turn()

    def step(self) -> None:
        """Step with the action of the agent whose turn it is."""
        rows = self._rows
        env = self._env
        if rows.leaving or rows.has_limit:
            rows.begin_frame()
        agent = self._agent
        env.step(self._actions.read(self._plan)[agent])
        self._read()
        self._join_new()
        try:
            rewards = env.rewards
        except AttributeError as error:
            raise RuntimeError(
                f"{self._name} has no env.rewards, the rewards of each step by agent: "
                f"{error}"
            ) from error
        if not self._rewarded:
            self._check_rewards(rewards)
        rows.rewards.write(rewards, rows.absent)
        if self._sums is not None:
            # Before a wrapper changes them.
            self._sums[agent] = 0.0
            for name, reward in rows.rewards.by_agent():
                self._sums[name] = self._sums.get(name, 0.0) + reward
        if rows.has_infos:
            rows.write_infos(env.infos)
        rows.select(agent, acts=False)
        self._record_ends()
        self._step_over_dead()
        if self._agents and rows.cuts:
            # The episode ends before the next turn, whose observation is its last.
            rows.write_observations({self._agent: env.observe(self._agent)})
        if rows.settle(over=not self._agents):
            self._write_state()
        else:
            self._next_turn()

    def audit(self) -> Iterator[str]:
        """Yield what is wrong with the agent whose turn it is: its mask, its rewards.

        Agents that are done may still be listed: they leave when it is their turn.
        """
        is_first = self._sums is None
        sums = self._sums = {} if self._sums is None else self._sums
        if not self._agents:
            return
        yield from self._rows.unknown_flags(self._terminations, self._truncations)
        yield from self._rows.take_returns()
        yield from self._rows.without_mask(self._env.infos, [self._agent])
        total = self._cumulative().get(self._agent, 0.0)
        known = sums.get(self._agent, 0.0)
        if is_first:  # Perhaps in the middle of an episode.
            return
        if total and abs(total - known) > _TOLERANCE * max(1.0, abs(total)):
            yield (
                f"last() returns the reward {total} of {self._agent}, but its rewards "
                f"since its last turn sum to {known}. Batches have env.rewards, so it "
                "must have the rewards of each step."
            )

    def _cumulative(self) -> Mapping[Any, float]:
        """Return the rewards that ``last()`` returns."""
        return getattr(self._env, "_cumulative_rewards", {})

    def _check_rewards(self, rewards: Mapping[Any, Any]) -> None:
        """Check that rewards which ``last()`` returns are in ``env.rewards`` too.

        Raises:
            RuntimeError: if there have been no others in this environment.
        """
        try:
            self._rewarded = any(rewards.values())
        except ValueError:  # An array, which is refused when it is written.
            self._rewarded = True
        if self._rewarded:
            return
        for agent, total in self._cumulative().items():
            if total:
                raise RuntimeError(
                    f"{self._name}: last() returns the reward {total} of {agent}, but "
                    "env.rewards has had only zeros so far. Batches have env.rewards: "
                    "write the rewards of each step there, and call "
                    "_accumulate_rewards(), which adds them to those of last()."
                )

    def _read(self) -> None:
        """Read what changes with a step, once: each read passes all wrappers."""
        env = self._env
        agents = env.agents
        if agents.__class__ is not list:
            agents = as_list(agents, self._name)
        self._agents = agents
        self._terminations = env.terminations
        self._truncations = env.truncations
        if self._agents:
            self._agent = env.agent_selection

    def _is_dead(self, agent: Any) -> bool:
        try:
            return bool(self._terminations[agent] or self._truncations[agent])
        except KeyError as error:
            raise RuntimeError(
                f"{self._name}: agent {agent} has the turn (env.agent_selection) or is "
                "in env.agents, but has no flag in env.terminations or truncations: "
                f"found {list(self._terminations)}. A step that removes an agent must "
                "give the turn to another one."
            ) from error

    def _step_dead(self) -> None:
        """Step the dead agent whose turn it is with None, which removes it.

        An environment may remove it later, when the other dead agents had their turn.

        Raises:
            RuntimeError: if all agents may have had their turn, and nobody left.
        """
        agent, before = self._agent, list(self._agents)
        self._env.step(None)
        self._read()
        self._ignored = self._ignored + 1 if self._agents == before else 0
        if self._ignored > len(self._env.possible_agents):
            raise RuntimeError(
                f"{self._name}: agent {agent} is done, but step(None) does not remove "
                "it from env.agents. step() must begin with: if the selected agent is "
                "terminated or truncated, return self._was_dead_step(action)."
            )

    def _join_new(self) -> None:
        rows = self._rows
        if rows.dead:
            ends = self._terminations, self._truncations
            rows.revive(self._agents, *ends, act=False)
        rows.join_new(self._agents, act=False)

    def _record_ends(self) -> None:
        self._rows.record_ends(self._agents, self._terminations, self._truncations)

    def _step_over_dead(self) -> None:
        env = self._env
        rows = self._rows
        self._ignored = 0
        while self._agents and self._is_dead(self._agent):
            agent = self._agent
            if agent not in rows.absent:
                rows.write_observations({agent: env.observe(agent)})
                rows.select(agent, acts=False)
            self._step_dead()
            if self._sums is not None:  # It begins anew if it comes back.
                self._sums.pop(agent, None)
            # Removing an agent may end others, or let them join or come back.
            before = set(rows.alive)
            self._join_new()
            joined = set(rows.alive) - before
            if joined:
                rows.write_infos(env.infos, joined)
            self._record_ends()

    def _next_turn(self) -> None:
        agent = self._agent
        if agent in self._rows.leaving:
            raise RuntimeError(
                f"{self._name}: within one step agent {agent} was done, "
                "came back and became the next agent to act, so its end cannot be "
                "recorded. The environment must not let an agent come back before "
                "another agent has acted."
            )
        self._rows.write_observations({agent: self._env.observe(agent)})
        if self._rows.takes_infos:
            self._rows.write_action_masks(self._env.infos, [agent])
        self._rows.select(agent, acts=True)
        self._plan = self._actions.plan([agent])
        self._write_state()

    def _write_state(self) -> None:
        if self._rows.wants_state:
            self._rows.write_state(self._env.state)
