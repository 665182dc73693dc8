"""Errors of workers, and how their exceptions are sent to the trainer.

An exception in a worker is sent as a ``Failure``. The trainer raises it with its
original type. Its cause is a ``WorkerError`` that names the place of the error and
contains the worker's traceback:

    worker                                  trainer
    except BaseException as exception:
        Failure.capture(exception, ...) -->  raise_failure(failure, worker)

If there is no exception to send (it cannot be pickled, the process was killed, or it
hangs), the trainer raises the ``WorkerError`` itself. Texts longer than 65,536
characters are shortened in the middle.
"""

import dis
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, NoReturn, Self


class MissingPackageError(ImportError):
    """A package is not installed. The message names it and says how to install it."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "marl-collect[{extra}]"'


@contextmanager
def imports_of(extra: str, user: str) -> Iterator[None]:
    """Explain an import in the block that fails.

    Args:
        extra: extra of this package that installs what is imported.
        user: what needs it, the subject of the message.

    Raises:
        MissingPackageError: for an ImportError; names the extra to install. One that
            is raised in the block, or an import of this package, passes unchanged.
    """
    try:
        yield
    except ImportError as error:
        ours = f"{error.name}".partition(".")[0] == __name__.partition(".")[0]
        if ours or isinstance(error, MissingPackageError):
            raise
        raise MissingPackageError(
            f"{user} needs {error.name or 'a package'}, which cannot be imported "
            f"({error}). Install it with: {install_command(extra)}",
            name=error.name,
        ) from error


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line outside this package that caused it."""
    level, frame = 1, sys._getframe()  # noqa: SLF001 - there is no public name
    while frame.f_back and _is_ours(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, which has an s unless the count is 1."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def unpicklable(value: object, dumps: Callable[[Any], object] | None = None) -> str:
    """Name the part of a value that cannot be pickled, and the function that uses it.

    For example "variable 'lock' of make.<locals>.<lambda> (run.py, line 7)".

    Args:
        value: cannot be pickled.
        dumps: pickles a part, or raises an error; by default that of cloudpickle.
    """
    import cloudpickle

    def fails(part: object) -> bool:
        try:
            (dumps or cloudpickle.dumps)(part)
        except Exception:  # noqa: BLE001 - pickling a user's object can raise anything
            return True
        return False

    path, seen = [type(value).__name__], {id(value)}
    while True:
        if isinstance(value, FunctionType):
            code = value.__code__
            line = f"{code.co_filename}, line {code.co_firstlineno}"
            path = [f"{value.__qualname__} ({line})"]
        for name, part in _parts(value):
            if id(part) not in seen and fails(part):
                seen.add(id(part))
                path.append(name)
                value = part
                break
        else:
            return " of ".join(reversed(path))


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that are pickled with a value, and what they are in it."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # It is empty.
                yield f"variable {name!r}", cell.cell_contents
        defaults = inspect.signature(value, follow_wrapped=False)
        yield from (
            (f"default of {p.name!r}", p.default) for p in defaults.parameters.values()
        )
        names = _global_names(value.__code__) & value.__globals__.keys()
        yield from ((f"global {n!r}", value.__globals__[n]) for n in sorted(names))
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, partial):
        yield "function", value.func
        yield from ((f"argument {i}", part) for i, part in enumerate(value.args))
        yield from ((f"argument {name!r}", p) for name, p in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"item {index}", part) for index, part in enumerate(value))
    yield from (
        (f"attribute {name!r}", part)
        for name, part in getattr(value, "__dict__", {}).items()
        if not name.startswith("__") or isinstance(part, FunctionType)
    )


def _global_names(code: CodeType) -> set[str]:
    read = {i.argval for i in dis.get_instructions(code) if "_GLOBAL" in i.opname}
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return read.union(*map(_global_names, inner))


def _is_ours(names: Mapping[str, Any]) -> bool:
    # Code that exec() runs may have no name.
    return str(names.get("__name__")).startswith("marl_collect.")


class ClosedError(RuntimeError):
    """An object was used after its ``close()``."""


def refuse_in_forks(owner: int, what: str) -> None:
    """Refuse to use in a fork what belongs to the process that was forked.

    Args:
        owner: process id of the process that built it.
        what: was built.

    Raises:
        RuntimeError: in another process.
    """
    if os.getpid() != owner:
        raise RuntimeError(
            f"Process {os.getpid()} is a fork of {owner}, which built this {what}: "
            "both would command the same processes. Build it in the process that uses "
            "it."
        )


class PolicyError(ValueError):
    """A policy wrote values that an environment or a batch cannot accept."""


class DatasetError(ValueError):
    """A file of a dataset is damaged, missing, or contradicts another one."""


class WorkerError(RuntimeError):
    """A worker process died, hung, or raised an exception.

    Attributes:
        worker: index of the worker in its pool.
        problem: what happened, as the verb of a sentence ("ended unexpectedly").
        detail: details in one line; may be empty.
        pid: the worker's process id; None if it never started.
        exitcode: as in ``multiprocessing.Process.exitcode``: ``-N`` means that
            signal ``N`` ended the process; None while it runs.
        phase: what the worker was doing ("create", "reset", "step", "policy",
            ...); None if unknown.
        environment: index of the environment, over all workers, that the worker
            was occupied with; None if unknown.
        remote_traceback: the traceback in the worker, as text; may be empty.
    """

    def __init__(
        self,
        worker: int,
        problem: str = "ended unexpectedly",
        detail: str = "",
        pid: int | None = None,
        exitcode: int | None = None,
        phase: str | None = None,
        environment: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        # Pickle passes these arguments to __init__; __str__ makes the text.
        super().__init__(
            worker, problem, detail, pid, exitcode, phase, environment, remote_traceback
        )
        self.worker = worker
        self.problem = problem
        self.detail = detail
        self.pid = pid
        self.exitcode = exitcode
        self.phase = phase
        self.environment = environment
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        who = f"Worker {self.worker}"
        if self.pid is not None:
            who += f" (pid {self.pid})"
        where = "" if self.phase is None else f" in {self.phase}"
        if self.phase == "idle":
            where = " while idle"
        elif self.phase == "command":
            where = " in a command"
        elif self.environment is not None:
            where += f" of environment {self.environment}"
        detail = f": {self.detail}" if self.detail else ""
        text = f"{who} {self.problem}{where}{detail}"
        if self.remote_traceback:
            text += f"\n\nTraceback in the worker:\n{self.remote_traceback.rstrip()}"
        return text


# Limits on the parts of an exception that are sent. Longer texts take minutes.
_TEXT_LIMIT: Final = 65_536
_BYTES_LIMIT: Final = 16 << 20
_GROUP_LIMIT: Final = 10

_CRASH: Final = "a crash in compiled code; its Python stack is on stderr"
_HINTS: Final = {
    "SIGKILL": "often the out-of-memory killer, see dmesg: use fewer workers or "
    "smaller batches",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"), _CRASH),
}


def describe_exit(exitcode: int | None) -> str:
    """Describe how a process ended.

    Args:
        exitcode: as in ``multiprocessing.Process.exitcode``.
    """
    if exitcode is None:
        return "it closed its socket but is still running"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = _HINTS.get(name)
    return f"killed by {name} ({hint})" if hint else f"killed by {name}"


def worker_error_of(exception: BaseException) -> WorkerError | None:
    """Return ``exception`` or its cause, whichever is a ``WorkerError``.

    None if the exception did not come from a worker.
    """
    if isinstance(exception.__cause__, WorkerError):
        return exception.__cause__
    return exception if isinstance(exception, WorkerError) else None


@dataclass(frozen=True)
class Failure:
    """An exception in the form in which a worker sends it to the trainer.

    Attributes:
        summary: type and text of the exception.
        remote_traceback: the traceback with causes and notes, as text.
        exception: the pickled exception; None if it cannot be pickled. Its texts are
            shortened if they are longer than 65,536 characters.
        notes: its notes, from ``add_note``.
        pid: the worker's process id.
        phase: what the worker was doing, if known.
        environment: index of its environment over all workers, if known.
        time: when it was raised, on ``time.monotonic``, which all processes share.
    """

    summary: str
    remote_traceback: str
    exception: bytes | None
    notes: tuple[str, ...]
    pid: int | None = None
    phase: str | None = None
    environment: int | None = None
    time: float = field(default_factory=time.monotonic)

    @classmethod
    def capture(
        cls,
        exception: BaseException,
        pid: int | None = None,
        phase: str | None = None,
        environment: int | None = None,
    ) -> Self:
        """Pack an exception with its current traceback."""
        small = _text_length(exception) <= _TEXT_LIMIT
        return cls(
            summary=_summarize(exception),
            remote_traceback=_format(exception, small=small),
            exception=_pickle_exception(exception, small=small),
            notes=tuple(_shortened(str(note)) for note in _notes(exception)),
            pid=pid,
            phase=phase,
            environment=environment,
        )

    def to_worker_error(self, worker: int) -> WorkerError:
        """Describe the failure of the worker with this index."""
        return WorkerError(
            worker,
            "failed",
            self.summary,
            pid=self.pid,
            phase=self.phase,
            environment=self.environment,
            remote_traceback=self.remote_traceback,
        )


def raise_failure(failure: Failure, worker: int) -> NoReturn:
    """Raise a worker's exception with its original type, from a ``WorkerError``.

    Args:
        failure: what the worker sent.
        worker: index of the worker in its pool.

    Raises:
        Exception: the exception itself, if it could be pickled.
        WorkerError: otherwise, and for ``KeyboardInterrupt``, ``SystemExit`` and
            ``StopIteration``, which have another meaning in the trainer.
    """
    exception = _unpickle_exception(failure)
    if exception is None:
        raise failure.to_worker_error(worker)
    try:
        raise exception from failure.to_worker_error(worker)
    finally:
        del exception  # Its traceback has this frame, which would keep it.


def _summarize(exception: BaseException) -> str:
    name = type(exception).__qualname__
    try:
        text = str(exception)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error
        text = "<its __str__ failed>"
    return _shortened(f"{name}: {text}" if text else name)


def _shortened(text: str) -> str:
    """Remove the middle of a text that is too long to send and print."""
    left_out = len(text) - _TEXT_LIMIT
    if left_out <= 0:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"


def _notes(exception: BaseException) -> Sequence[object]:
    notes = getattr(exception, "__notes__", ())
    return notes if isinstance(notes, Sequence) else (notes,)


def _chain(exception: BaseException) -> list[tuple[str, BaseException]]:
    """Return an exception and its causes, last first, each with its introduction."""
    links: list[tuple[str, BaseException]] = []
    seen: set[int] = set()
    link, said = exception, ""
    while id(link) not in seen:
        seen.add(id(link))
        links.append((said, link))
        if link.__cause__ is not None:
            link, said = link.__cause__, "The direct cause of the next one:"
        elif link.__context__ is not None and not link.__suppress_context__:
            link, said = link.__context__, "Being handled when the next one was raised:"
    return links


def _text_length(exception: BaseException) -> int:
    """Count the characters in the messages of an exception and its causes."""
    length = 0
    counted: set[int] = set()  # A group may be the cause of one of its parts.
    pending = [exception]
    while pending:
        for _, link in _chain(pending.pop()):
            if id(link) in counted:
                break
            counted.add(id(link))
            with suppress(Exception):  # Its __str__ may fail.
                length += len(str(link)) + sum(len(str(note)) for note in _notes(link))
            if isinstance(link, BaseExceptionGroup):
                pending += link.exceptions
    return length


def _format(exception: BaseException, *, small: bool) -> str:
    """Return the traceback with causes and notes.

    Args:
        exception: the exception with its traceback.
        small: whether its texts are short. Python takes minutes to format long ones,
            so they are shortened first.
    """
    if small:
        return _shortened("".join(traceback.format_exception(exception)))
    parts = []
    for said, link in reversed(_chain(exception)):
        frames = "".join(traceback.format_tb(link.__traceback__))
        notes = [_shortened(str(note)) for note in _notes(link)]
        group = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        of_group = [f"One of them: {_summarize(part)}" for part in group[:_GROUP_LIMIT]]
        lines = [said, frames.rstrip(), _summarize(link), *notes, *of_group]
        parts.append("\n".join(filter(None, lines)))
    return _shortened("\n\n".join(parts))


def _pickle_exception(exception: BaseException, *, small: bool) -> bytes | None:
    """Pickle an exception; None if the trainer cannot raise it."""
    import cloudpickle

    # A StopIteration would silently end the trainer's own loop.
    if not isinstance(exception, Exception) or isinstance(
        exception, StopIteration | StopAsyncIteration
    ):
        return None
    try:
        sent = exception if small else _with_short_texts(exception)
        data: bytes = cloudpickle.dumps(sent, protocol=5)
        restored = pickle.loads(data)
    except Exception:  # noqa: BLE001 - user classes may fail in any way; text remains
        return None
    fits = len(data) <= _BYTES_LIMIT
    return data if fits and type(restored) is type(exception) else None


def _with_short_texts(exception: Exception) -> object:
    """Return a copy whose arguments and attributes are shortened.

    Raises:
        Exception: if its class cannot be called with its arguments.
    """

    def short(value: Any) -> Any:
        return _shortened(value) if isinstance(value, str) else value

    copy = type(exception)(*map(short, exception.args))
    attributes = {k: short(v) for k, v in vars(exception).items() if k != "__notes__"}
    vars(copy).update(attributes)
    if len(str(copy)) > 2 * _TEXT_LIMIT:
        raise ValueError("its text is long for another reason")
    return copy


def _unpickle_exception(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        exception = pickle.loads(failure.exception)
    except Exception:  # noqa: BLE001 - then the WorkerError has the text
        return None
    if not isinstance(exception, BaseException):
        return None
    present = getattr(exception, "__notes__", ())
    for note in failure.notes:
        if note not in present:
            exception.add_note(note)
    return exception
