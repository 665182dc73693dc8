"""The main loop of a collector's worker: builds environments, executes calls.

See ``marl_collect.collectors.messages`` for the order of the calls.
"""

from functools import partial
from typing import Any, final

import torch
from tensordict.nn import set_interaction_type

from marl_collect.buffers.layout import Layout
from marl_collect.collectors import messages
from marl_collect.collectors.worker_policy import WorkerPolicy
from marl_collect.core.description import Key
from marl_collect.core.factories import build
from marl_collect.core.gradients import note_on_gradients
from marl_collect.core.seeding import seed_global_generators
from marl_collect.errors import worker_error_of
from marl_collect.processes.context import Attempt, WorkerContext, attempt
from marl_collect.processes.launcher import share_imports
from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.processes.status_board import (
    ENVIRONMENT,
    WEIGHTS_READ,
    Phase,
    fence,
)
from marl_collect.rollout.alternating import AlternatingRollout, make_rollout
from marl_collect.rollout.env_calls import EnvCall, Outcome, returned
from marl_collect.rollout.episodes import Plan
from marl_collect.rollout.loop import Collected, Rollout
from marl_collect.rollout.progress import LineProgress


def main(context: WorkerContext, assignment: messages.Assignment) -> None:
    """Build the environments, then execute calls until the socket is closed."""
    torch.set_num_threads(assignment.num_threads)
    torch.set_grad_enabled(False)
    context.line.enter(Phase.CREATE, assignment.first)
    if assignment.init_fn is not None:
        assignment.init_fn()
    worker = RolloutWorker(context, assignment)
    with context.closing(worker.engine.close):
        try:
            engine = worker.engine
            context.send((engine.description, engine.size))
            while True:
                method, arguments = context.receive()
                context.send(getattr(worker, method)(*arguments))
        except BaseException as error:
            worker.name_environment(error)
            note_on_gradients(error)
            raise


@final
class RolloutWorker:
    """A worker's environments, policy and slots. The trainer calls the methods."""

    def __init__(self, context: WorkerContext, assignment: messages.Assignment) -> None:
        self._context = context
        self._assignment = assignment
        self.engine = build(
            assignment.factories,
            assignment.first,
            building=partial(context.line.enter, Phase.CREATE),
            failing=context.fail,
        )
        self._parts = self.engine.parts()
        self._policy: WorkerPolicy
        self._rollout: Rollout | AlternatingRollout
        self._before: Any = None
        self._slots: dict[int, dict[Key, Any]] = {}

    def name_environment(self, error: BaseException) -> None:
        """Write the environment that raised ``error`` to the status line, if known."""
        raised = [p.first + p.raised for p in self._parts if p.raised is not None]
        cause = worker_error_of(error)
        if cause is not None and cause.environment is not None:  # Of a ParallelEnv.
            raised = [self._parts[0].first + cause.environment]
        if raised:
            self._context.line.cells[ENVIRONMENT] = raised[0] + 1

    # Calls of the trainer, in the order of the first ones

    def prepare(self, plan: Plan, policy: Any) -> messages.Prepared:
        """Number the environments, and build the policy and call it.

        Args:
            plan: which episodes to collect.
            policy: a ``SkeletonPolicy`` or ``FactoryPolicy``, a callable without
                weights, or None for random actions.
        """
        seed_global_generators(plan.seed, plan.environments.start, plan.generation)
        line, acting = self._context.line, self._assignment.acting
        if isinstance(policy, messages.FactoryPolicy):
            line.enter(Phase.CREATE)
        self._policy = WorkerPolicy(policy, self._parts, plan)
        line.enter(Phase.POLICY)
        runners = self._policy.runners(self._parts, acting)
        self._rollout = make_rollout(
            self._parts,
            runners,
            plan,
            LineProgress(line, self.engine.size),
            check_actions=acting.check_actions,
        )
        share_imports()
        return runners[0].signature, self._policy.layout, self._rollout.explain()

    def publish_weights(self, weights_slot: int, handle: Any) -> None:
        """Write the policy's own weights to this slot."""
        self._policy.publish(weights_slot, handle)

    def use_slot(
        self,
        slot: int,
        memory: MemoryHandle,
        layout: Layout,
        rows: range,
        frames: int,
    ) -> None:
        """Map the memory of a slot.

        Args:
            slot: its number.
            memory: of the slot.
            layout: of the slot.
            rows: of the worker.
            frames: number of frames that the worker fills in each row.
        """
        segment = Segment.attach(memory)
        arrays = layout.arrays(segment.buffer, slice(rows.start, rows.stop))
        self._slots[slot] = {key: array[:, :frames] for key, array in arrays.items()}
        segment.close()  # The arrays keep the mapping alive.

    def collect(
        self, command: messages.Collect, weights: messages.Weights, level: int
    ) -> Collected:
        """Fill the worker's rows of a slot, acting with these weights.

        Args:
            command: which slot, and how.
            weights: to act with.
            level: of the curriculum, for episodes that begin.
        """
        self._policy.use(weights)
        for slot in command.vacant:
            self._slots.pop(slot, None)
        rollout, line = self._rollout, self._context.line
        rollout.set_level(level)
        environments = rollout.plan.environments
        # POLICY must be set before WEIGHTS_READ: with IDLE the worker would seem done.
        # With several environments the note of an error names the environment.
        line.enter(Phase.POLICY, environments[0] if len(environments) == 1 else None)
        fence()  # The trainer overwrites the weights once it sees the number.
        line.cells[WEIGHTS_READ] = weights.order
        if command.mark:
            # Before the reset, because a worker that resumes from it resets again.
            self._before = rollout.mark()
        if command.reset:
            rollout.reset()
        with set_interaction_type(self._assignment.acting.exploration):
            return rollout.collect(
                self._slots[command.slot], weights.version, random=command.random
            )

    def use_plan(self, plan: Plan) -> None:
        """Switch to another plan. Its first episodes begin with the next frame."""
        seed_global_generators(plan.seed, plan.environments.start, plan.generation)
        self._rollout.use_plan(plan)

    def reset(self, level: int) -> None:
        """Begin a new episode in every environment, at the curriculum's level."""
        self._rollout.set_level(level)
        self._rollout.reset()

    def state(self, before: bool) -> Any:  # noqa: FBT001 - the name is not sent
        """Return the rollout's state: now, or ``before`` the last rollout."""
        return self._rollout.state(self._before if before else None)

    def load(self, state: Any, level: int, fresh: bool = False) -> tuple[int, ...]:  # noqa: FBT001, FBT002 - the name is not sent
        """Resume from a state; return the number of each running episode.

        Args:
            state: of a rollout.
            level: of the curriculum, for episodes that begin.
            fresh: begin the next episodes instead of replaying the running ones.
        """
        self._rollout.set_level(level)
        self._rollout.load(state, fresh=fresh)
        return self._rollout.running

    def attribute(self, owner: str, name: str) -> Attempt:
        """Return an attribute of the ``"policy"`` or of the ``"env"``."""
        if owner == "policy":
            return attempt(getattr, self._policy.module, name)
        return attempt(self.engine.attribute, name)

    def call_env(self, call: EnvCall) -> tuple[EnvCall, list[Attempt]]:
        """Call a method of environments.

        Returns:
            The call in those environments in which it was made, and the results, see
            ``Rollout``. A result that cannot be pickled is an error, but was made.
        """
        environments = self._rollout.plan.environments
        outcomes: list[Outcome]
        try:
            outcomes = self._rollout.call_env(call)
        except (AttributeError, ValueError) as error:
            outcomes = [(None, error)]
        made = returned(call, [error is not None for _, error in outcomes])
        return made, [
            attempt(_value_of, outcome, environment=environments[row])
            for row, outcome in zip(call.rows, outcomes, strict=False)
        ]


def _value_of(outcome: Outcome) -> Any:
    """Return what a call returned, or raise what it raised."""
    value, error = outcome
    if error is not None:
        raise error
    return value
