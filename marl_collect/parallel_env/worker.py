"""The main function of a process of ParallelEnv. Must not import torch.

It waits for commands on the shared flags, runs them on its own environments, and
reports completion; see ``signals.py``. Messages on the socket are rare:

    trainer                                   worker
    EnvAssignment (at the start) ---------->  build the environments
                            <---------------  EnvDescription
    ("attach", ...) ----------------------->  map memory and flags
                            <---------------  None
    ("call_on_each", ...) ----------------->  use attributes and methods
                            <---------------  number of the call, ``Attempt``
    None ---------------------------------->  (no reply: reading it is progress)
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from marl_collect.buffers.layout import Layout
from marl_collect.core.batch import SerialBatch
from marl_collect.core.factories import Factory, build_singles
from marl_collect.parallel_env.cpus import affinity, pin
from marl_collect.parallel_env.signals import EnvOperation, Signals, operation_of
from marl_collect.processes.context import Attempt, Call, WorkerContext, attempt
from marl_collect.processes.launcher import share_imports
from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.processes.status_board import (
    ENVIRONMENT,
    PHASE,
    STEPS,
    STOP,
    Phase,
)

_CHECK_SECONDS: Final = 0.25
"""Interval at which a sleeping worker checks whether the trainer closed."""


@final
@dataclass(frozen=True)
class EnvAssignment:
    """The argument of a worker.

    Attributes:
        rows: the rows of each group that the worker steps.
        factories: the factories of these environments, in the order of the rows.
        num_sub_threads: number of torch threads, if an environment imports torch.
        pins: whether the worker is pinned to a processor if there is one for each.
    """

    rows: tuple[range, ...]
    factories: tuple[Factory, ...]
    num_sub_threads: int
    pins: bool


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
    with context.closing(batch.close):
        _limit_torch(assignment.num_sub_threads)  # If a factory has imported it.
        context.send(batch.description)
        env_of_row = dict(zip(indices, envs, strict=True))
        worker = _EnvWorker(context, assignment, env_of_row, processors)
        worker.answer()
        worker.serve()


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
        envs: dict[int, Any],
        processors: frozenset[int],
    ) -> None:
        """Get ready for ``attach``.

        Args:
            context: the socket and the status line.
            assignment: what this worker steps.
            envs: its environments, by row.
            processors: those that it could use before it built the environments.
        """
        self._context = context
        self._line = context.line
        self._assignment = assignment
        self._rows = assignment.rows
        self._envs = envs
        self._processors = processors

    def answer(self) -> None:
        """Read a message; call what it names, and reply. EOFError ends the worker."""
        call: Call | None = self._context.receive()
        if call is not None:
            method, arguments = call
            self._context.send(getattr(self, method)(*arguments))

    def attach(
        self,
        memory: MemoryHandle,
        layout: Layout,
        signals: MemoryHandle,
        sizes: tuple[int, int, int],
        spin: float,
    ) -> None:
        """Map the memory of all environments and the flags; bind each environment.

        Args:
            memory: the environments' memory.
            layout: layout of that memory, ``[N, 1]``.
            signals: the memory of the flags.
            sizes: of the flags, see ``Signals``.
            spin: seconds to spin before sleeping.
        """
        if self._assignment.pins:
            pin(self._context.index, sizes[0], self._processors)
        self._memory = Segment.attach(memory)
        self._signals = Signals(Segment.attach(signals), sizes, spin, fresh=False)
        arrays, envs = layout.arrays(self._memory.buffer), self._envs
        for k, env in envs.items():
            env.bind({key: array[k, 0, ...] for key, array in arrays.items()})
        self._steps = [[(k + 1, envs[k].step_row) for k in rows] for rows in self._rows]
        share_imports()

    def call_on_each(
        self,
        number: int,
        rows: Sequence[int],
        function: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> tuple[int, Attempt]:
        """Call ``function(env, *arguments)`` for the environments of some rows.

        Returns:
            The number of the call, and the results, or what the function raised.
        """
        envs = [self._envs[k] for k in rows]
        return number, attempt(lambda: [function(env, *arguments) for env in envs])

    def serve(self) -> None:
        """Run commands until the trainer closes."""
        signals, me = self._signals, self._context.index
        self._line.cells[PHASE] = Phase.IDLE
        groups = range(len(self._rows))
        steps: dict[int, Callable[[int], None]] = {
            EnvOperation.STEP: self._step,
            EnvOperation.STEP_CHOSEN: self._step_chosen,
            EnvOperation.RESET_CHOSEN: self._reset_chosen,
        }
        try:
            while True:
                signals.listen(me, _CHECK_SECONDS)
                if self._line.cells[STOP]:
                    return
                idle = True
                for group in groups:
                    command = signals.pending_command(group, me)
                    if command is not None:
                        idle = False
                        steps[operation_of(command)](group)
                        self._line.cells[PHASE] = Phase.IDLE
                        signals.finish(group, me, command)
                while idle and self._context.has_message():
                    self.answer()
                    self._line.cells[PHASE] = Phase.IDLE
        except BaseException:
            # Wakes the trainer at once instead of at its next check.
            signals.fail(me)
            raise

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
