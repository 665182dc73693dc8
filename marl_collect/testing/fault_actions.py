"""What environments do at their worst; ``Fault(stuck, "step")`` makes one do it."""

import ctypes
import os
import sys
import threading


def stuck() -> None:
    """Stay in C for ever, with the interpreter lock held."""
    ctypes.PyDLL(None).sleep(100_000)


def flood() -> None:
    """Print a mebibyte, through Python and past it, as libraries in C do."""
    line = b"warning: nobody asked for this line of sixty-four characters...\n"
    os.write(1, line * 8192)
    sys.stdout.write(line.decode() * 8192)


class UnpicklableError(RuntimeError):
    """An exception that holds a lock."""

    def __init__(self, text: str) -> None:
        """Take the lock along."""
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    """Raise what cannot travel to another process."""
    raise UnpicklableError("holds a lock")
