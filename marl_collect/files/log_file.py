"""Files of progress: a line per event, with the time."""

import time
from pathlib import Path
from typing import Final

from marl_collect.files.atomic import named_if_full

LOG: Final = "progress.log"
"""Name of the file in the folder of a run or a comparison."""


def add_line(path: Path, text: str) -> None:
    """Append a line with the time to a file; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_if_full(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
