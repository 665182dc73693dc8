"""Steps environments whose agents act simultaneously (PettingZoo's parallel API)."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from marl_collect.envs.pettingzoo.actions import Actions, Plan
from marl_collect.envs.pettingzoo.description import as_list, check_reset
from marl_collect.envs.pettingzoo.fast_path import ParallelWorld
from marl_collect.envs.pettingzoo.rows import Rows

_LATER = 20
"""Steps after an episode in which ``audit`` looks for agents that come back."""
_RESULTS = ("observation", "reward", "termination", "truncation", "info")


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
        if rows.has_infos or rows.watches_infos:
            rows.write_infos(infos)
            rows.write_action_masks(infos, self._agents)
        if rows.wants_state:
            rows.write_state(self._env.state)

    def step(self) -> None:
        """Step with the row's actions."""
        rows = self._rows
        env = self._env
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
            infos.values()  # Infos may be None.
        except (TypeError, ValueError, AttributeError) as error:
            raise self._wrong_result(returned) from error
        if rows.dead:
            rows.revive(present, terminations, truncations, act=True)
        if changed:
            rows.join_new(present, terminations, truncations, act=True)
        rows.write_observations(observations)
        rows.rewards.write(rewards, rows.absent)
        if rows.has_infos:
            rows.write_infos(infos)
            rows.write_action_masks(infos, present)
        elif rows.watches_infos:
            rows.refuse_masks(infos, present)
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
