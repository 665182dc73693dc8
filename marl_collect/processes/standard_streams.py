"""Keeps file descriptors 0, 1 and 2 occupied in a trainer started without them.

A process may be started with its stdin, stdout or stderr closed (``>&-``). The next
file or socket that it opens then gets one of these numbers, and its child processes use
that file as their stdout.
"""

import contextlib
import os


def occupy() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed."""
    # open() returns the lowest free number. Stop once it is above 2.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def output(fd: int, stack: contextlib.ExitStack) -> int:
    """Return a descriptor of this process's stdout or stderr.

    Returns /dev/null if there is none: the number is free, or another file has it,
    which unlike a standard stream is not inheritable.

    Args:
        fd: 1 or 2.
        stack: closes the descriptor if one was opened.
    """
    try:
        if os.get_inheritable(fd):
            return fd
    except OSError:
        pass  # The descriptor is closed.
    null = os.open(os.devnull, os.O_WRONLY)
    stack.callback(os.close, null)
    return null
