"""Refuses to start processes while a worker imports its main function.

A worker imports the modules that define its main function and its factories. If one of
them builds a collector at its top level, every worker would build one too, and so would
their workers, without end. Our processes therefore start nothing while they import a
module or unpickle what they will run. Environments may start pools when they are built.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_IMPORT_SYSTEM = "<frozen importlib._bootstrap"

_process: str | None = None  # Kind of process; None if it is not ours.
_unpickling: str | None = None  # What is being unpickled, if anything.


def mark_process(process: str) -> None:
    """Mark this process as one that runs code another process sent.

    Args:
        process: its kind, with an article, for error messages: ``"A worker"``.
    """
    global _process
    _process = process


@contextmanager
def unpickling(what: str) -> Iterator[None]:
    """Refuse to start processes inside this block if this process is marked."""
    global _unpickling
    before, _unpickling = _unpickling, what
    try:
        yield
    finally:
        _unpickling = before


def refuse_during_import(what: str) -> None:
    """Raise an error if this process is marked and still importing or unpickling.

    Args:
        what: is to be started, for error messages: ``"a pool of workers"``.

    Raises:
        RuntimeError: naming the module that is imported and where to build instead.
    """
    if _process is None:
        return
    busy = _current_import()
    if busy is None and _unpickling is not None:
        busy = f"unpickling {_unpickling}"
    if busy is not None:
        raise RuntimeError(
            f"{_process} is still {busy}, which builds a collector or a ParallelEnv. "
            f"{what[0].upper()}{what[1:]} is not started here, because each of its "
            "workers would start another one, without end. Build it under "
            '`if __name__ == "__main__":` or in a function, or move the factories to '
            "a module that starts no processes at import."
        )


def _current_import() -> str | None:
    """Return which module this thread is importing; None if none."""
    frame: FrameType | None = inspect.currentframe()
    body: FrameType | None = None  # Of the innermost module being executed.
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and body is None:
            body = frame
        elif code.co_filename.startswith(_IMPORT_SYSTEM):
            if body is None:  # An extension module, which has no frame.
                return "importing a module"
            name = body.f_globals.get("__name__", "?")
            where = f"{body.f_code.co_filename}, line {body.f_lineno}"
            return f"importing the module {name!r} ({where})"
        frame = frame.f_back
    return None
