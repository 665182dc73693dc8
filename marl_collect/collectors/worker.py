"""What runs inside a collector's worker: build from factories, then obey commands.

See :mod:`marl_collect.collectors.messages` for the order of the commands.
"""

from contextlib import suppress
from functools import singledispatchmethod
from typing import Any, final

import torch
from tensordict.nn import set_interaction_type
from torch import nn

from marl_collect.collectors import messages
from marl_collect.description import Key
from marl_collect.factories import build
from marl_collect.memory import Segment
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import PolicyRunner, RandomRunner
from marl_collect.processes.board import WEIGHTS_READ, Phase
from marl_collect.processes.context import WorkerContext
from marl_collect.rollout import Rollout
from marl_collect.skeleton import put_together, weight_tensors
from marl_collect.weights import WeightLayout, WeightReader


def main(context: WorkerContext, assignment: messages.Assignment) -> None:
    """Build the environments, then obey until the trainer closes the socket."""
    torch.set_num_threads(assignment.num_threads)
    torch.set_grad_enabled(False)
    # Draws of the user's own modules differ between workers, and repeat with a seed.
    torch.manual_seed(assignment.plan.seed + assignment.plan.environments.start)
    context.line.enter(Phase.CREATE, assignment.plan.environments.start)
    if assignment.init_fn is not None:
        assignment.init_fn()
    worker = _Worker(context, assignment)
    try:
        context.send(messages.Ready(worker.engine.description))
        while True:
            context.line.enter(Phase.IDLE)
            worker.obey(context.receive())
    except BaseException:
        if context.closed:
            context.line.enter(Phase.CLOSE)
            worker.engine.close()
        else:
            # The error is what the trainer shall hear of, and the line where it was.
            with suppress(Exception):
                worker.engine.close()
        raise


@final
class LineProgress:
    """Notes on the progress board what a rollout is doing."""

    def __init__(self, context: WorkerContext) -> None:
        """Write to the worker's line."""
        self._line = context.line
        self._cells = context.line.cells

    def resetting(self, environment: int) -> None:
        """Note that ``environment`` begins an episode."""
        self._line.enter(Phase.RESET, environment)

    def acting(self) -> None:
        """Note that the policy acts."""
        self._cells[0] = 4

    def stepping(self) -> None:
        """Note that the environments step, and count it."""
        cells = self._cells
        cells[0] = 3
        cells[1] += 1


@final
class _Worker:
    def __init__(self, context: WorkerContext, assignment: messages.Assignment) -> None:
        self._context = context
        self._assignment = assignment
        self._rows = slice(
            assignment.plan.environments.start, assignment.plan.environments.stop
        )
        self.engine = build(assignment.factories, assignment.plan.environments.start)
        self._policy: Any = None
        self._runner: PolicyRunner
        self._rollout: Rollout
        self._reader: WeightReader | None = None
        self._vector: torch.Tensor
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, dict[Key, Any]] = {}

    @singledispatchmethod
    def obey(self, command: object) -> None:
        """Do what the trainer asks for, and reply."""
        raise TypeError(f"Unknown command {command!r}.")

    @obey.register
    def _(self, command: messages.RandomActions) -> None:
        del command
        self._use(RandomRunner(self.engine.description), None)

    @obey.register
    def _(self, command: messages.SkeletonPolicy) -> None:
        # Zeros until the first weights are pulled; the vector is then bound to them.
        self._vector = torch.zeros(command.layout.nbytes, dtype=torch.uint8)
        tensors = command.layout.views(self._vector)
        self._act_with(put_together(command.skeleton, tensors), command.layout)

    @obey.register
    def _(self, command: messages.CallablePolicy) -> None:
        self._context.line.enter(Phase.CREATE)
        policy = command.policy() if command.builds else command.policy
        layout = None
        if isinstance(policy, nn.Module):
            weights = weight_tensors(policy)
            layout = WeightLayout.plan(weights)
            self._vector = torch.zeros(layout.nbytes, dtype=torch.uint8)
            views = layout.views(self._vector)
            for tensor, view in zip(weights.values(), views, strict=True):
                view.copy_(tensor.detach())
                tensor.data = view
        self._act_with(policy, layout)

    @obey.register
    def _(self, command: messages.UseWeights) -> None:
        self._reader = WeightReader(command.handle, self._vector)
        if command.publish:
            self._reader.publish_own()
        self._context.send(messages.Attached())

    @obey.register
    def _(self, command: messages.UseSlot) -> None:
        segment = Segment.attach(command.path, command.layout.nbytes)
        self._segments[command.slot] = segment
        self._slots[command.slot] = command.layout.arrays(segment.buffer, self._rows)
        self._context.send(messages.Attached())

    @obey.register
    def _(self, command: messages.Collect) -> None:
        if self._reader is not None:
            self._reader.pull(command.version)
        self._context.line.cells[WEIGHTS_READ] = command.version
        if command.reset:
            self._rollout.reset()
        with set_interaction_type(self._assignment.exploration):
            episodes = self._rollout.collect(
                self._slots[command.slot], command.version, random=command.random
            )
        self._context.send(messages.Collected(command.version, tuple(episodes)))

    def _act_with(self, policy: Any, layout: WeightLayout | None) -> None:
        engine = self.engine
        self._context.line.enter(Phase.POLICY)
        self._use(ModuleRunner(policy, engine.description, engine.size), layout)

    def _use(self, runner: PolicyRunner, layout: WeightLayout | None) -> None:
        self._runner = runner
        progress = LineProgress(self._context)
        self._rollout = Rollout(self.engine, runner, self._assignment.plan, progress)
        self._context.send(
            messages.PolicyReady(
                dict(runner.outputs), dict(runner.carried), runner.reads_is_init, layout
            )
        )
