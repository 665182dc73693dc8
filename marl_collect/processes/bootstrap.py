"""The entry point of a worker process, forked or spawned.

The trainer's first message is a ``WorkerSetup``. The second is the pickled main
function and its argument. They are separate because unpickling the second may import
modules, which needs the ``sys.path`` of the first. The user's script is not run again:
nothing reads the trainer's ``__main__``.
"""

import contextlib
import os
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final, NoReturn

from marl_collect.errors import Failure
from marl_collect.processes import import_guard, pickling, survival
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.orphans import WORKER_VARIABLE
from marl_collect.processes.shared_memory import MemoryHandle
from marl_collect.processes.status_board import Phase, StatusBoard

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the environment variables that limit libraries to ``num_threads``."""
    return dict.fromkeys(THREAD_VARIABLES, str(num_threads))


def _trainer_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}


@dataclass(frozen=True)
class WorkerSetup:
    """The trainer's environment, path and directory when it starts a worker.

    Attributes:
        index: the worker's index in its pool.
        name: the process's name in ``ps`` and ``top``.
        status_board: the pool's status board.
        num_threads: value of the thread variables in the worker.
    """

    index: int
    name: str
    status_board: MemoryHandle
    num_threads: int = 1
    environment: dict[str, str] = field(default_factory=_trainer_environment)
    path: tuple[str, ...] = field(default_factory=pickling.search_path)
    arguments: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    directory: str | None = field(default_factory=pickling.working_directory)

    def apply(self) -> None:
        """Apply the trainer's environment, path and directory to this process."""
        os.environ.clear()
        os.environ.update(self.environment, **thread_environment(self.num_threads))
        os.environ[WORKER_VARIABLE] = str(os.getpid())
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        if self.directory is not None:
            os.chdir(self.directory)
        survival.set_name(self.name)


def run_worker(command_fd: int) -> NoReturn:
    """Run a worker's main function, then exit the process.

    The process skips the interpreter's teardown, which is slow and crashes with some
    C++ libraries. ``atexit`` hooks do not run. Buffers are flushed, and pools and
    ``multiprocessing`` children of the worker are ended.

    Args:
        command_fd: the worker's end of its socket to the trainer. This function
            takes ownership.
    """
    code = 1
    import_guard.mark_process("A worker")
    connection = Connection(command_fd)  # Open until the process ends.
    try:
        survival.reset_signals()
        survival.enable_fault_dumps()
        _reseed()
        code = _serve(connection)
    except BaseException:  # noqa: BLE001 - the last frame of this process
        traceback.print_exc()
    finally:
        _leave(code)


def run_spawned(command_fd: int, parent: int, *, tied_by_kernel: bool) -> NoReturn:
    """Tie a fresh interpreter to its parent's life, then run as a worker.

    Args:
        command_fd: our end of the command socket.
        parent: process id of the parent.
        tied_by_kernel: whether the thread that started us lives as long as its
            process, so that ``PR_SET_PDEATHSIG`` can be used.
    """
    survival.reset_signals()
    if tied_by_kernel:
        survival.die_with_parent(parent)
    else:
        survival.wake_at_parents_end()
    survival.watch_parent(parent)
    run_worker(command_fd)


def _serve(connection: Connection) -> int:
    """Run the main function; return the exit code."""
    context: WorkerContext | None = None
    try:
        setup: WorkerSetup = pickle.loads(connection.recv_bytes())
        line = StatusBoard.attach(setup.status_board).lines[setup.index]
        context = WorkerContext(setup.index, connection, line)
        setup.apply()
        with import_guard.unpickling("its main function and its factories"):
            main, argument = pickle.loads(connection.recv_bytes())
        main(context, argument)
        line.enter(Phase.CLOSE)
    except EOFError as exception:
        if context is None or context.closed:
            return 0  # The trainer closed the pool.
        return _report(connection, context, exception)
    except BaseException as exception:  # noqa: BLE001 - the trainer handles it
        return _report(connection, context, exception)
    return 0


def _report(
    connection: Connection, context: WorkerContext | None, exception: BaseException
) -> int:
    if context is not None:
        context.fail(exception)
        return 1
    # There is no status line yet.
    failure = Failure.capture(exception, os.getpid())
    with contextlib.suppress(OSError):
        connection.send_bytes(pickling.dumps(failure))
    return 1


def _reseed() -> None:
    """Reseed numpy's global generator.

    Without this, all workers forked from one server would draw the same numbers.
    Python's ``random`` reseeds itself after a fork.
    """
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _leave(code: int) -> NoReturn:
    try:
        cleanup = sys.modules.get("marl_collect.processes.cleanup")
        if cleanup is not None:
            cleanup.close_all()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util._exit_function()  # noqa: SLF001 - as multiprocessing's own children do
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        survival.flush_c_streams()
    except BaseException:  # noqa: BLE001 - no frame is left to catch it
        traceback.print_exc()
    finally:
        os._exit(code)
