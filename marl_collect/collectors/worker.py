"""The main loop of a collector's worker: builds environments, executes commands.

See ``marl_collect.collectors.messages`` for the order of the commands.
"""

import time
from contextlib import suppress
from functools import partial, singledispatchmethod
from operator import attrgetter
from typing import Any, final

import torch
from tensordict.nn import set_interaction_type
from torch import nn

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.collectors import messages
from marl_collect.collectors.initialization import build_policy
from marl_collect.core.description import Key
from marl_collect.core.factories import build
from marl_collect.core.gradients import note_on_gradients
from marl_collect.core.seeding import seed_global_generators, weights_seed
from marl_collect.errors import worker_error_of
from marl_collect.policies.choose import make_runner
from marl_collect.policies.runner import PolicyRunner, RandomRunner
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.launcher import share_imports
from marl_collect.processes.shared_memory import Segment
from marl_collect.processes.status_board import (
    ENVIRONMENT,
    PHASE,
    PREEMPT,
    REPLAYED,
    STEPS,
    STOP,
    WEIGHTS_READ,
    Phase,
    fence,
)
from marl_collect.rollout.alternating import AlternatingRollout, make_rollout
from marl_collect.rollout.episodes import Plan
from marl_collect.rollout.loop import ProgressReporter, Rollout
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.module_settings import Path, apply_settings
from marl_collect.weights.shared import Reader
from marl_collect.weights.skeleton import assemble_module, weight_tensors

_WRITES = attrgetter("_version")
_STEP = int(Phase.STEP)
_POLICY = int(Phase.POLICY)
_COMMAND = int(Phase.COMMAND)


def main(context: WorkerContext, assignment: messages.WorkerAssignment) -> None:
    """Build the environments, then execute commands until the socket is closed."""
    torch.set_num_threads(assignment.num_threads)
    torch.set_grad_enabled(False)
    context.line.enter(Phase.CREATE, assignment.first)
    if assignment.init_fn is not None:
        assignment.init_fn()
    worker = RolloutWorker(context, assignment)
    try:
        context.send(
            messages.WorkerReady(worker.engine.description, worker.engine.size)
        )
        while True:
            context.line.enter(Phase.IDLE)
            worker.execute(context.receive())
    except BaseException as error:
        if context.closed:
            context.line.enter(Phase.CLOSE)
            worker.engine.close()
        else:
            # First the report: close() may hang or fail too.
            worker.name_environment(error)
            note_on_gradients(error)
            context.fail(error)
            with suppress(Exception):
                worker.engine.close()
        raise


@final
class LineProgress(ProgressReporter):
    """Records on the status board what a rollout is doing."""

    def __init__(self, context: WorkerContext, environments: int) -> None:
        """Write to the worker's line of the status board."""
        self._line = context.line
        self._cells = context.line.cells
        self._several = environments > 1

    def resetting(self, environment: int) -> None:
        """Note that ``environment`` begins an episode."""
        self._line.enter(Phase.RESET, environment)

    def acting(self) -> None:
        """Note that the policy acts."""
        self._cells[PHASE] = _POLICY
        if self._several:
            self._cells[ENVIRONMENT] = 0  # No environment; the last reset is done.

    def stepping(self) -> None:
        """Note that the environments step, and count it."""
        cells = self._cells
        cells[PHASE] = _STEP
        cells[STEPS] += 1

    def replaying(self) -> None:
        """Note that recorded episodes make a step."""
        cells = self._cells
        cells[PHASE] = _COMMAND
        cells[REPLAYED] += 1

    def preempted(self) -> bool:
        """Return whether the trainer wants the rollout or the worker to end."""
        cells = self._cells
        return cells[PREEMPT] != 0 or cells[STOP] != 0


@final
class RolloutWorker:
    """Holds a worker's environments, policy and slots, and executes commands."""

    def __init__(
        self, context: WorkerContext, assignment: messages.WorkerAssignment
    ) -> None:
        self._context = context
        self._assignment = assignment
        self.engine = build(
            assignment.factories,
            assignment.first,
            building=partial(context.line.enter, Phase.CREATE),
            failing=context.fail,
        )
        self._parts = self.engine.parts()
        self._plan: Plan
        self._policy: Any = None
        self._rollout: Rollout | AlternatingRollout = None  # type: ignore[assignment]
        self._reader: Reader | None = None
        self._vector: torch.Tensor
        self._layout: WeightLayout | None = None
        # What the module acts with: the vector, or copies on a device of its views.
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._written: list[int] = []
        self._settings: dict[Path, Any] = {}
        self._before: Any = None
        self._slots: dict[int, dict[Key, Any]] = {}

    def name_environment(self, error: BaseException) -> None:
        """Write the environment that raised ``error`` to the status line, if known."""
        cause = worker_error_of(error)
        k = None if cause is None else cause.environment  # Of a ParallelEnv here.
        first = self._parts[0].first
        for part in self._parts:
            if k is None and part.raised is not None:
                k = part.first - first + part.raised
        if k is not None:
            self._context.line.cells[ENVIRONMENT] = first + k + 1

    @singledispatchmethod
    def execute(self, command: object) -> None:
        """Execute a command of the trainer, and reply."""
        raise TypeError(f"Unknown command {command!r}.")

    @execute.register
    def _(self, plan: Plan) -> None:
        self._plan = plan
        self._seed_generators(plan.seed)
        if self._rollout is not None:
            self._rollout.use_plan(plan)

    @execute.register
    def _(self, command: messages.RandomActions) -> None:
        del command
        description = self.engine.description
        self._use([RandomRunner(description) for _ in self._parts], None)

    @execute.register
    def _(self, command: messages.SkeletonPolicy) -> None:
        handle = command.handle
        self._vector = torch.zeros(
            handle.layout.nbytes, dtype=torch.uint8, device="cpu"
        )
        self._reader = handle.attach(self._vector)
        # Before the first call: zero weights would hide differences between paths.
        self._reader.pull(command.place, range(len(handle.layout.ranges)))
        tensors = handle.layout.views(self._vector)
        self._act_with(assemble_module(command.skeleton, tensors), handle.layout)

    @execute.register
    def _(self, command: messages.CallablePolicy) -> None:
        self._act_with(command.policy, None)

    @execute.register
    def _(self, command: messages.BuiltPolicy) -> None:
        self._context.line.enter(Phase.CREATE)
        policy = build_policy(
            command.factory,
            self._parts,
            self._plan,
            weights_seed(self._plan.seed, command.index),
            trust=command.trust,
        )
        layout = None
        if isinstance(policy, nn.Module):
            weights = weight_tensors(policy)
            layout = WeightLayout.of(policy)
            self._vector = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
            views = layout.views(self._vector)
            for tensor, view in zip(weights.values(), views, strict=True):
                view.copy_(tensor.detach())
                tensor.data = view
        self._act_with(policy, layout)

    @execute.register
    def _(self, command: messages.PublishWeights) -> None:
        self._reader = command.handle.attach(self._vector)
        self._reader.publish_own()
        self._context.send(messages.MemoryAttached())

    @execute.register
    def _(self, command: messages.UseSlot) -> None:
        segment = Segment.attach(command.memory)
        arrays = command.layout.arrays(segment.buffer, slice(*command.rows))
        for key, array in arrays.items():
            if key == TRAJ_IDS:
                array[:, command.frames :] = -1
        self._slots[command.slot] = {
            key: array[:, : command.frames] for key, array in arrays.items()
        }
        segment.close()  # The arrays keep the mapping alive.
        self._context.send(messages.MemoryAttached())

    @execute.register
    def _(self, command: messages.Collect) -> None:
        weights = command.weights
        self._take(weights)
        for slot in command.vacant:
            self._slots.pop(slot, None)
        # POLICY must be set before WEIGHTS_READ: with IDLE the worker would seem done.
        self._context.line.enter(Phase.POLICY)
        line, environments = self._context.line, self._plan.environments
        # With several environments the note of an error names the environment.
        line.enter(Phase.POLICY, environments[0] if len(environments) == 1 else None)
        fence()  # The trainer overwrites the weights once it sees the number.
        line.cells[WEIGHTS_READ] = weights.order
        rollout = self._rollout
        if command.snapshot:
            # Before the reset, because a worker that resumes from it resets again.
            self._before = rollout.state()
        if command.reset:
            rollout.reset()
        begin = time.perf_counter()
        with set_interaction_type(self._assignment.acting.exploration):
            frames, episodes = rollout.collect(
                self._slots[command.slot], weights.version, random=command.random
            )
        seconds = {
            "rollout": time.perf_counter() - begin,
            "reset": rollout.take_reset_seconds(),
        }
        self._context.send(
            messages.Collected(
                frames=frames,
                episodes=episodes,
                running=rollout.running,
                seconds=seconds,
                last=tuple(rollout.take_last()),
            )
        )

    @execute.register
    def _(self, command: messages.BeginEpisodes) -> None:
        del command
        self._rollout.reset()
        self._context.send(messages.Done())

    @execute.register
    def _(self, command: messages.Reseed) -> None:
        self._seed_generators(command.seed)
        self._rollout.reseed(command.seed)
        self._context.send(messages.Done())

    @execute.register
    def _(self, command: messages.GetState) -> None:
        state = self._before if command.before else self._rollout.state()
        self._context.send(messages.Done(state))

    @execute.register
    def _(self, command: messages.LoadState) -> None:
        self._rollout.load(command.state, begin=command.begin)
        self._context.send(messages.Done(self._rollout.running))

    @execute.register
    def _(self, command: messages.GetAttribute) -> None:
        def read() -> Any:
            if command.owner == "policy":
                return getattr(self._policy, command.name)
            return self.engine.attribute(command.name)

        # The error of a user's property is an answer, not a failure of the worker.
        self._context.send(messages.Done(messages.Attribute.read(read)))

    @execute.register
    def _(self, command: messages.Explain) -> None:
        del command
        self._context.send(messages.Done(self._rollout.explain()))

    def _take(self, weights: messages.Weights) -> None:
        """Load these weights, and the settings that come with them."""
        if weights.handle is not None:
            self._reader = weights.handle.attach(self._vector)
        if weights.settings is not None:
            apply_settings(self._policy, weights.settings, self._settings)
        if self._reader is None or weights.place is None:
            return
        layout = self._layout
        assert layout is not None
        ranges = weights.ranges
        # Torch counts the writes to a tensor through any of its views.
        if self._written != list(map(_WRITES, self._tensors)):
            ranges = range(len(layout.ranges))  # The module has written some of them.
        self._reader.pull(weights.place, ranges)
        if self._views:
            for index in ranges:
                part = layout.ranges[index].tensors
                torch._foreach_copy_(self._tensors[part], self._views[part])
        self._written = list(map(_WRITES, self._tensors))

    def _seed_generators(self, seed: int) -> None:
        """Seed the global generators of this process."""
        plan = self._plan
        seed_global_generators(seed, plan.environments.start, plan.generation)

    def _act_with(self, policy: Any, layout: WeightLayout | None) -> None:
        self._policy, self._layout = policy, layout
        self._context.line.enter(Phase.POLICY)
        acting = self._assignment.acting
        device = torch.device(acting.device)
        if layout is not None:
            self._tensors = [self._vector]
            if device.type != "cpu":
                # Its tensors are copied to after every pull.
                policy = policy.to(device)
                self._tensors = [t.detach() for t in weight_tensors(policy).values()]
                self._views = layout.views(self._vector)
            self._written = list(map(_WRITES, self._tensors))
        self._use([make_runner(policy, part, acting) for part in self._parts], layout)

    def _use(self, runners: list[PolicyRunner], layout: WeightLayout | None) -> None:
        progress = LineProgress(self._context, self.engine.size)
        self._rollout = make_rollout(
            self._parts,
            runners,
            self._plan,
            progress,
            check_actions=self._assignment.acting.check_actions,
        )
        share_imports()
        self._context.send(messages.PolicyReady(runners[0].signature, layout))
