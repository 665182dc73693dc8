"""Runs in a Ray actor: a ``WorkerPool`` on a node, and the memory of its workers.

    trainer                               relay                        worker
    start(main, assignments) ---------->  start the pool
    reserve(worker, name, size) ------->  memory on this node
    send(worker, message, weights) ---->  write the weights  ------->  execute it
    receive()  <------------------------  reply, filled memory  <----  reply

Messages stay pickled here. The relay therefore needs neither torch nor the modules of
the user, and starts fast; its workers' fork server has them.
"""

import os
import pickle
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.errors import ClosedError, Failure, WorkerError, worker_error_of
from marl_collect.processes.launcher import start_server
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.processes.starting import Main

Bytes = NDArray[np.uint8]
Name = int | str
"""Of a worker's memory: the number of a slot, or ``WEIGHTS``."""
WEIGHTS: Final = "weights"

SEND: Final = "send"
RECEIVE: Final = "receive"
LOOK: Final = "look"
GROUPS: Final = {SEND: 1, RECEIVE: 1, LOOK: 1}
"""Threads of each group of methods: the calls of a group run in order."""

_PAUSE: Final = 0.2  # Seconds between two checks for workers that hang.


@final
@dataclass(frozen=True)
class Reply:
    """What a worker sent, or how it failed.

    Attributes:
        worker: its index in the relay's pool.
        message: the pickled reply, its exception, or how it died.
        filled: name of the memory that it has filled, if any.
        content: of that memory.
    """

    worker: int
    message: bytes | Failure | WorkerError
    filled: Name | None = None
    content: Bytes | None = None


@final
class _Pickled:
    """A pickled object, which becomes that object when it is unpickled again."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


@final
class Relay:
    """The workers of one actor."""

    _pool: WorkerPool

    def __init__(self, path: Sequence[str], preload: Sequence[str]) -> None:
        """Start the workers' fork server.

        Args:
            path: the trainer's module search path.
            preload: modules for the server; empty without one.
        """
        known = set(sys.path)
        sys.path += [p for p in path if p not in known and os.path.isdir(p)]
        if preload:
            with suppress(OSError):  # The first worker fails too, and reports it.
                start_server(preload)
        self._memory: dict[tuple[int, Name], Segment] = {}
        self._filling: dict[int, Name] = {}  # By worker, until its next reply.
        self._unsent: list[Reply] = []
        self._failed: set[int] = set()

    # In order, in the thread of SEND

    def start(
        self, main: bytes, assignments: Sequence[bytes], options: Mapping[str, Any]
    ) -> dict[str, Any] | Failure:
        """Start a worker for each pickled assignment; return where this actor runs.

        Returns:
            The actor's ``pid``, Ray's id of its ``node``, and the name of its ``host``.
        """
        import ray

        try:
            arguments = [_Pickled(assignment) for assignment in assignments]
            self._pool = WorkerPool(cast(Main, _Pickled(main)), arguments, **options)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            return Failure.capture(error, os.getpid())
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": node, "host": platform.node()}

    def restart(self, worker: int, assignment: bytes) -> Failure | None:
        """Replace a worker."""
        try:
            self._pool.restart(worker, _Pickled(assignment))
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            return Failure.capture(error, os.getpid())
        self._filling.pop(worker, None)
        self._failed.discard(worker)
        return None

    def reserve(self, worker: int, name: Name, nbytes: int) -> MemoryHandle | Failure:
        """Reserve memory for a worker, instead of what it had under this name."""
        purpose = f"The memory of worker {worker} of an actor"
        try:
            segment = Segment.create(nbytes, purpose)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            return Failure.capture(error, os.getpid())
        self._memory[worker, name] = segment
        return segment.handle

    def send(
        self,
        worker: int,
        message: bytes,
        fills: Name | None,
        vacant: Sequence[Name],
        *weights: Bytes,
    ) -> None:
        """Write weights to a worker's memory, then send it a message.

        Args:
            worker: its index; it is idle if there are weights.
            message: pickled.
            fills: the memory whose content its next reply is sent with.
            vacant: memory that the worker uses no longer.
            weights: of its policy; at most one vector.
        """
        try:
            for vector in weights:
                memory = np.frombuffer(self._memory[worker, WEIGHTS].buffer, np.uint8)
                memory[:] = vector
            if fills is not None:
                self._filling[worker] = fills
            for name in vacant:
                self._memory.pop((worker, name), None)
            self._pool.send(worker, _Pickled(message))
        except Exception as error:  # noqa: BLE001 - the next reply reports it
            self._unsent.append(Reply(worker, Failure.capture(error, os.getpid())))

    def preempt(self, worker: int, preempted: bool) -> None:  # noqa: FBT001 - as Ray calls it
        """Let the rollouts of a worker end early, or no longer."""
        self._pool.preempt(worker, preempted=preempted)

    def close(self, timeout: float) -> list[WorkerError]:
        """End the workers; return the errors that they raised meanwhile."""
        return list(self._pool.close(timeout))

    # While another call runs

    def receive(self) -> Reply | None:
        """Wait for the next reply of any worker; None if the pool is closed.

        The failure of a worker is returned once.
        """
        while not self._unsent:
            watched = [w for w in range(len(self._pool)) if w not in self._failed]
            try:
                if not self._pool.poll(watched, _PAUSE):
                    self._pool.check(watched)
                    continue
                worker, message = self._pool.receive(watched)
            except ClosedError:
                return None
            except Exception as error:  # noqa: BLE001 - the trainer raises it
                return self._failure(error)
            name = self._filling.pop(worker, None)
            if name is None:
                return Reply(worker, message)
            buffer = self._memory[worker, name].buffer
            return Reply(worker, message, name, np.frombuffer(buffer, np.uint8))
        return self._unsent.pop(0)

    def look(self) -> tuple[list[int], tuple[int, ...]]:
        """Return the steps of the workers, and their process ids."""
        pool = self._pool
        return [pool.steps(worker) for worker in range(len(pool))], pool.pids

    def resident_bytes(self, worker: int) -> int:
        """Return the resident memory of a worker."""
        return self._pool.resident_bytes(worker)

    def _failure(self, error: Exception) -> Reply:
        cause = worker_error_of(error)
        if cause is None:
            raise error
        self._failed.add(cause.worker)
        if error is cause:
            return Reply(cause.worker, cause)
        failure = replace(
            Failure.capture(error, cause.pid, cause.phase, cause.environment),
            remote_traceback=cause.remote_traceback,
        )
        return Reply(cause.worker, failure)
