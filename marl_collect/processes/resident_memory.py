"""The resident memory of a process."""

import os
from contextlib import suppress
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it ended or it is unknown."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
