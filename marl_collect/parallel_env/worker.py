"""The main function of a process of ParallelEnv. Must not import torch.

It waits for commands on the shared flags, runs them on its own environments, and
reports completion; see ``signals.py``. Messages on the socket are rare.
"""

import os
import sys
from contextlib import suppress
from functools import partial
from typing import Final, final

import cloudpickle

from marl_collect.core.batch import RowEnv, SerialBatch
from marl_collect.core.factories import build_singles
from marl_collect.errors import Failure
from marl_collect.parallel_env.attributes import ask
from marl_collect.parallel_env.cpus import affinity, pin
from marl_collect.parallel_env.messages import (
    AskSome,
    AttachMemory,
    EnvAnswer,
    EnvAssignment,
    EnvsAttached,
)
from marl_collect.parallel_env.signals import EnvOperation, Signals, operation_of
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.launcher import share_imports
from marl_collect.processes.shared_memory import Segment
from marl_collect.processes.status_board import ENVIRONMENT, PHASE, STEPS, Phase

_LOOK_SECONDS: Final = 0.25
"""Interval at which a sleeping worker checks whether the trainer closed."""


def main(context: WorkerContext, assignment: EnvAssignment) -> None:
    """Build the environments, then run commands until the trainer closes."""
    line, indices = context.line, [k for rows in assignment.rows for k in rows]
    processors = affinity()
    _limit_torch(assignment.num_sub_threads)  # If the fork server has imported it.
    envs = build_singles(
        assignment.factories,
        indices,
        building=partial(line.enter, Phase.CREATE),
        failing=context.fail,
    )
    batch = SerialBatch(envs)
    try:
        _limit_torch(assignment.num_sub_threads)  # If a factory has imported it.
        context.send(batch.description)
        attach = context.receive()
        assert isinstance(attach, AttachMemory)
        if assignment.pins:
            pin(context.index, attach.shape.processes, processors)
        _EnvWorker(
            context, assignment, dict(zip(indices, envs, strict=True)), attach
        ).serve()
    except BaseException as error:
        if context.closed:
            line.enter(Phase.CLOSE)
            batch.close()
        else:
            # First the report: close() may hang or fail too.
            context.fail(error)
            with suppress(Exception):
                batch.close()
        raise
    line.enter(Phase.CLOSE)
    batch.close()


def _limit_torch(num_threads: int) -> None:
    """Limit the threads of torch if it has been imported."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)


@final
class _EnvWorker:
    """The environments of one process, on the shared memory."""

    def __init__(
        self,
        context: WorkerContext,
        assignment: EnvAssignment,
        envs: dict[int, RowEnv],
        attach: AttachMemory,
    ) -> None:
        """Map the memory and bind each environment to its row."""
        self._context = context
        self._line = context.line
        self._rows = assignment.rows
        self._envs = envs
        self._memory = Segment.attach(attach.memory)
        self._signals = Signals(
            Segment.attach(attach.signals), attach.shape, fresh=False
        )
        arrays = attach.layout.arrays(self._memory.buffer)
        for k, env in envs.items():
            env.bind({key: array[k, 0, ...] for key, array in arrays.items()})
        self._steps = [[(k + 1, envs[k].step_row) for k in rows] for rows in self._rows]
        share_imports()
        context.send(EnvsAttached())

    def serve(self) -> None:
        """Run commands until the trainer closes."""
        signals, me = self._signals, self._context.index
        self._line.cells[PHASE] = Phase.IDLE
        groups = range(signals.shape.groups + 1)
        try:
            while True:
                called = signals.listen(me, _LOOK_SECONDS)
                if self._line.should_stop:
                    return
                for group in groups:
                    command = signals.pending_command(group, me)
                    if command is not None:
                        self._do(group, operation_of(command))
                        signals.finish(group, me, command)
                if not called and self._context.has_message():
                    self._read()
                    self._line.cells[PHASE] = Phase.IDLE
        except BaseException:
            # Wakes the trainer at once instead of at its next check.
            signals.fail(me)
            raise

    def _do(self, group: int, operation: int) -> None:
        if operation == EnvOperation.STEP:
            self._step(group)
        elif operation == EnvOperation.STEP_CHOSEN:
            self._step_chosen(group)
        elif operation == EnvOperation.RESET_CHOSEN:
            self._reset_chosen(group)
        else:
            self._read()
        self._line.cells[PHASE] = Phase.IDLE

    def _step(self, group: int) -> None:
        cells, steps = self._line.cells, self._steps[group]
        cells[PHASE] = Phase.STEP
        for environment, step in steps:
            cells[ENVIRONMENT] = environment
            step()
            cells[STEPS] += 1

    def _step_chosen(self, group: int) -> None:
        for k in self._chosen(group):
            self._line.enter(Phase.STEP, k)
            self._envs[k].step_row()
            self._line.cells[STEPS] += 1

    def _reset_chosen(self, group: int) -> None:
        for k in self._chosen(group):
            self._line.enter(Phase.RESET, k)
            self._envs[k].reset_row(self._signals.seeds[k])

    def _chosen(self, group: int) -> list[int]:
        chosen = self._signals.chosen
        return [k for k in self._rows[group] if chosen[k]]

    def _read(self) -> None:
        """Read and answer all available messages; EOFError ends the worker."""
        while self._context.has_message():
            message = self._context.receive()
            if isinstance(message, AskSome):
                self._answer(message)

    def _answer(self, message: AskSome) -> None:
        try:
            envs = [self._envs[k] for k in message.environments]
            values = tuple(ask(env, message.question) for env in envs)
            answer = EnvAnswer(cloudpickle.dumps(values, protocol=5))
        except Exception as error:  # noqa: BLE001 - the trainer handles it
            answer = EnvAnswer(failure=Failure.capture(error, os.getpid()))
        self._context.send(answer)
