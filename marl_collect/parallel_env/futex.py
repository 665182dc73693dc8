"""Sleeping until a number in shared memory changes, and waking whoever sleeps.

On Linux this is the futex: no descriptor to hand over, one system call wakes any
number of processes, and the kernel compares the number once more before it lets
anybody sleep. Elsewhere a sleeper looks again every fifth of a millisecond.
"""

import ctypes
import platform
import sys
import threading
import time
from typing import Any, Final, Protocol, final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT_BITSET: Final = 9
_WAKE_BITSET: Final = 10
_ALL: Final = 2**31 - 1
_POLL_SECONDS: Final = 0.0002


class Word(Protocol):
    """A 32-bit number in shared memory on which processes sleep."""

    def sleep(self, value: int, seconds: float, mask: int) -> None:
        """Sleep while the number is ``value``; may return early.

        Args:
            value: what the number was when there was reason to sleep.
            seconds: at most.
            mask: bits, not 0: who we are.
        """
        ...

    def wake(self, mask: int) -> None:
        """Wake every sleeper with a bit of ``mask``; the number must have changed."""
        ...


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _typed(syscall: Any) -> Any:
    syscall.restype = ctypes.c_long
    syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return syscall


@final
class Futex:
    """The word of the Linux kernel."""

    def __init__(self, buffer: Any, offset: int) -> None:
        """Use the 4 bytes of ``buffer`` at ``offset``, a multiple of 4."""
        self._kept = ctypes.c_uint32.from_buffer(buffer, offset)
        self._address = ctypes.addressof(self._kept)
        self._number = _NUMBERS[platform.machine()]
        # Sleeping lets other threads of this process run; waking is too short to.
        self._sleep = _typed(ctypes.CDLL(None).syscall)
        self._wake = _typed(ctypes.PyDLL(None).syscall)

    def sleep(self, value: int, seconds: float, mask: int) -> None:
        """See `Word`."""
        end = time.monotonic() + seconds
        whole = int(end)
        until = ctypes.byref(_Timespec(whole, int((end - whole) * 1e9)))
        # Signals, changed values and the end of time all mean: look again.
        self._sleep(self._number, self._address, _WAIT_BITSET, value, until, None, mask)

    def wake(self, mask: int) -> None:
        """See `Word`."""
        self._wake(self._number, self._address, _WAKE_BITSET, _ALL, None, None, mask)


@final
class PolledWord:
    """A word for systems without futex."""

    def __init__(self, buffer: Any, offset: int) -> None:
        """Use the 4 bytes of ``buffer`` at ``offset``, a multiple of 4."""
        self._cell = memoryview(buffer)[offset : offset + 4].cast("I")

    def sleep(self, value: int, seconds: float, mask: int) -> None:
        """See `Word`."""
        del mask
        end = time.monotonic() + seconds
        while self._cell[0] == value and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)  # noqa: TID251 - nothing here can be waited on

    def wake(self, mask: int) -> None:
        """See `Word`: sleepers look by themselves."""


def word(buffer: Any, offset: int) -> Word:
    """Return the best word that this system has."""
    if sys.platform == "linux" and platform.machine() in _NUMBERS:
        return Futex(buffer, offset)
    return PolledWord(buffer, offset)


_LOCK: Final = threading.Lock()


def fence() -> None:
    """Let no load or store move across this line.

    Taking a lock is an atomic read-modify-write, which x86 orders with everything;
    on ARM it is nearly so, and a missed wake-up there costs one look's interval.
    """
    with _LOCK:
        pass
