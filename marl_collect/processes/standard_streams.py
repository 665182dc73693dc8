"""File descriptors 0, 1 and 2: what a trainer that was started without them needs.

A process may be started with its stdin, stdout or stderr closed (``>&-``). The next
file or socket that it opens then gets one of these numbers, and a process that it
starts takes that file for its own stdout.
"""

import contextlib
import os


def occupy() -> None:
    """Open /dev/null wherever this process has no stdin, stdout or stderr."""
    # The lowest number that is free is taken, so until it is above theirs.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def output(fd: int, stack: contextlib.ExitStack) -> int:
    """Return a descriptor of what is this process's stdout or stderr.

    /dev/null, if there is none: the number is free, or a file of this process
    has it, which unlike a stream is not meant to be inherited.

    Args:
        fd: 1 or 2.
        stack: closes what was opened for this.
    """
    try:
        if os.get_inheritable(fd):
            return fd
    except OSError:
        pass  # Nothing is open there.
    null = os.open(os.devnull, os.O_WRONLY)
    stack.callback(os.close, null)
    return null
