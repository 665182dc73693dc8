"""Refusing to start processes that would start others without end.

A worker imports what its main function and its factories are defined in. Where
such a module builds a collector at its top level, every worker would build one
too, and so would each of theirs. In a process of ours, nothing is therefore
started while a module is imported, or while what the process shall run is
unpickled. Environments that open pools when they are called are no such case.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_IMPORT_SYSTEM = "<frozen importlib._bootstrap"

_process: str | None = None  # What kind of a process of ours this is; None if none.
_unpickling: str | None = None  # What is being unpickled; None if nothing.


def mark_process(process: str) -> None:
    """Say that this process runs what another one sent or named.

    Args:
        process: what it is, with an article, for messages: ``"A worker"``.
    """
    global _process
    _process = process


@contextmanager
def unpickling(what: str) -> Iterator[None]:
    """Let no processes be started inside this block, if this is a process of ours."""
    global _unpickling
    before, _unpickling = _unpickling, what
    try:
        yield
    finally:
        _unpickling = before


def refuse_during_import(what: str) -> None:
    """Raise an error where starting processes would never end.

    Args:
        what: is to be started, for messages: ``"a pool of workers"``.

    Raises:
        RuntimeError: in a process of ours that is still importing or unpickling.
    """
    if _process is None:
        return
    busy = _import_at_hand()
    if busy is None and _unpickling is not None:
        busy = f"unpickling {_unpickling}"
    if busy is not None:
        raise RuntimeError(
            f"{_process} is still {busy}, and that builds a collector or a "
            f"ParallelEnv: {what} is not started here, because each of its workers "
            "would do the same, without end. Build it under "
            '`if __name__ == "__main__":` or in a function, or define the factories in '
            "a module that only defines things."
        )


def _import_at_hand() -> str | None:
    """Say which module this thread is importing; None if it is importing none."""
    frame: FrameType | None = inspect.currentframe()
    body: FrameType | None = None  # Of the innermost module that is being executed.
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
