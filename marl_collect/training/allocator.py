"""Keeps freed memory in the process, for the activations of the next minibatch.

Training on pictures allocates and frees the same large tensors in every minibatch. By
default glibc returns each to the system and later takes fresh pages, which the kernel
has to clear.

Source:
    mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 1 << 30
"""Bytes. Larger blocks are rare, and are still returned to the system."""


def keep_freed_memory() -> bool:
    """Let the C library of this process keep freed blocks of up to 1 GiB.

    The process then holds the most memory that it ever used at one time. Other
    processes, such as workers, are not affected.

    Returns:
        Whether the C library has these settings, as glibc has.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    )
