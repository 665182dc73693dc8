"""Alternating rollouts: the policy acts for one part of a batch while the others step.

The parts' environments step in other processes, so inference and simulation overlap.
The collected data equal those of a single rollout of the whole batch.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from marl_collect.core.batch import EnvBatch, consecutive
from marl_collect.core.replay import EpisodeActions
from marl_collect.core.signature import check_same_signature
from marl_collect.policies.runner import PolicyRunner
from marl_collect.rollout.env_calls import EnvCall, Outcome, joined_calls, part_of
from marl_collect.rollout.episodes import (
    Arrays,
    EndedEpisodes,
    Plan,
    join_trees,
    rows_of,
)
from marl_collect.rollout.loop import Collected, Rollout, StateMark
from marl_collect.rollout.progress import ProgressReporter


def make_rollout(
    parts: Sequence[EnvBatch],
    policies: Sequence[PolicyRunner],
    plan: Plan,
    progress: ProgressReporter,
    *,
    check_actions: bool = False,
) -> "Rollout | AlternatingRollout":
    """Return a ``Rollout`` of one part, or an ``AlternatingRollout`` of several.

    Each part has its own runner of the policy.
    """
    if len(parts) > 1:
        progress = _JointReporter(progress, len(parts))
    rollouts: list[Rollout] = []
    first = 0
    for part, policy in zip(parts, policies, strict=True):
        part_plan = _part_of(plan, slice(first, first + part.size))
        rollouts.append(
            Rollout(part, policy, part_plan, progress, check_actions=check_actions)
        )
        who = f"environments {part_plan.environments}"
        check_same_signature(policies[0].signature, policy.signature, who)
        first += part.size
    if not isinstance(progress, _JointReporter):
        return rollouts[0]
    return AlternatingRollout(rollouts, plan, progress)


@final
class AlternatingRollout:
    """Collects rollouts of all parts into the rows of one slot."""

    def __init__(
        self, rollouts: Sequence[Rollout], plan: Plan, progress: "_JointReporter"
    ) -> None:
        """Alternate between rollouts.

        Args:
            rollouts: of the parts, in order.
            plan: which episodes they collect together.
            progress: to which all of them report.
        """
        self._rollouts = rollouts
        self._progress = progress
        self.plan = plan
        sizes = [len(rollout.plan.environments) for rollout in rollouts]
        self._rows = [slice(rows.start, rows.stop) for rows in consecutive(sizes)]

    def explain(self) -> str:
        """Return how actions are computed, and why."""
        return self._rollouts[0].explain()

    def use_plan(self, plan: Plan) -> None:
        """Switch to another plan. Its first episodes begin with the next frame."""
        self.plan = plan
        for rows, rollout in zip(self._rows, self._rollouts, strict=True):
            rollout.use_plan(_part_of(plan, rows))

    def reset(self) -> None:
        """Begin a new episode in every environment."""
        for rollout in self._rollouts:
            rollout.reset()

    def call_env(self, call: EnvCall) -> list[Outcome]:
        """Call a method of some environments; see ``Rollout.call_env``."""
        return [
            outcome
            for rows, rollout in zip(self._rows, self._rollouts, strict=True)
            if (part := call.in_rows(range(rows.start, rows.stop))).rows
            for outcome in rollout.call_env(part)
        ]

    def set_level(self, level: int) -> None:
        """Set the curriculum's level for episodes that begin from now on."""
        for rollout in self._rollouts:
            rollout.set_level(level)

    def collect(
        self, slot: Arrays, version: int = 0, *, random: bool = False
    ) -> Collected:
        """Fill ``slot``; see ``marl_collect.rollout.loop.Rollout.collect``."""
        started = time.perf_counter()
        going: list[Generator[None, None, Collected]] = []
        for rows, rollout in zip(self._rows, self._rollouts, strict=True):
            piece = {key: array[rows] for key, array in slot.items()}
            going.append(rollout.frames(piece, version, random=random))
        parts: list[Collected] = []
        while not parts:
            self._progress.look()
            for frames in going:
                try:
                    next(frames)
                except StopIteration as end:
                    parts.append(end.value)
        return Collected(
            frames=parts[0].frames,
            episodes=EndedEpisodes.join([part.episodes for part in parts]),
            running=self.running,
            seconds=time.perf_counter() - started,
            reset_seconds=sum(part.reset_seconds for part in parts),
            last=[
                (rows.start + last, frame, observations)
                for rows, part in zip(self._rows, parts, strict=True)
                for last, frame, observations in part.last
            ],
            explanation=parts[0].explanation,
        )

    @property
    def running(self) -> tuple[int, ...]:
        """Number of each environment's running episode."""
        return tuple(number for part in self._rollouts for number in part.running)

    def mark(self) -> list[StateMark]:
        """Return the marks of all parts."""
        return [rollout.mark() for rollout in self._rollouts]

    def state(self, mark: Sequence[StateMark] | None = None) -> dict[str, Any]:
        """Return the same state as a single rollout of all environments."""
        marks = self.mark() if mark is None else mark
        pairs = zip(self._rollouts, marks, strict=True)
        states = [rollout.state(part) for rollout, part in pairs]
        actions = [EpisodeActions(**state["actions"]) for state in states]
        return states[0] | {
            "actions": vars(EpisodeActions.join(actions)),
            "calls": joined_calls(
                [state["calls"] for state in states],
                [rows.start for rows in self._rows],
            ),
            **{key: join_trees([state[key] for state in states]) for key in _BY_ROW},
        }

    def load(self, state: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Continue from ``state``, also from that of a single rollout."""
        actions = EpisodeActions(**state["actions"])
        for rows, rollout in zip(self._rows, self._rollouts, strict=True):
            part = {key: rows_of(state[key], rows) for key in _BY_ROW}
            part["actions"] = vars(actions.take(np.arange(rows.start, rows.stop)))
            part["calls"] = part_of(state["calls"], range(rows.start, rows.stop))
            rollout.load({**state, **part}, fresh=fresh)


_BY_ROW = ("environments", "generators", "carried", "is_init", "assigned")
"""Parts of a state that consist of arrays ``[K, ...]``, or are None."""


def _part_of(plan: Plan, rows: slice) -> Plan:
    return replace(
        plan,
        environments=plan.environments[rows],
        episodes=plan.episodes[rows],
        given_seeds=plan.given_seeds[rows],
    )


@final
class _JointReporter(ProgressReporter):
    """Reports the progress of all parts as that of one rollout."""

    def __init__(self, progress: ProgressReporter, parts: int) -> None:
        self._inner = progress
        self._parts = parts
        self._stepping = 0
        self._ends = False
        # Bound here, so that a report costs one call.
        self.resetting = progress.resetting  # type: ignore[method-assign]
        self.acting = progress.acting  # type: ignore[method-assign]
        self.replaying = progress.replaying  # type: ignore[method-assign]

    def stepping(self) -> None:
        """Report one step when every part has begun its own."""
        self._stepping += 1
        if self._stepping == self._parts:
            self._stepping = 0
            self._inner.stepping()

    def look(self) -> None:
        """Decide whether this round is the last, so that all parts end together."""
        self._ends = self._inner.preempted()

    def preempted(self) -> bool:
        """Return the decision of ``look``."""
        return self._ends
