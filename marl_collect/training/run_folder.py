"""The folder of one run: configuration, progress, checkpoints; nothing half-written.

==========================  ===================================================
file                        what
==========================  ===================================================
``config.json``             task, setup, seed, options, versions
``progress.csv``            a row per batch: losses, returns, speed
``evaluations.json``        every evaluation, with each episode's return
``checkpoints/last.pt``     everything that resuming needs
``checkpoints/best.pt``     the networks of the best evaluation
``events.out.tfevents.*``   the same metrics for TensorBoard, if it is installed
``videos/``                 evaluation episodes, if asked for
``result.json``             the metrics of the finished run
``.lock``                   held by the process that trains
==========================  ===================================================
"""

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from marl_collect.storage.files import LOCK, FolderLock

CONFIG = "config.json"
PROGRESS = "progress.csv"
EVALUATIONS = "evaluations.json"
RESULT = "result.json"
LAST = "checkpoints/last.pt"
BEST = "checkpoints/best.pt"


@final
class RunFolder:
    """Reads and writes the files of one run.

    Files are replaced atomically, so they are complete even if the process is killed.
    Rows of ``progress.csv`` are appended one by one.

    Args:
        path: the folder; made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> FolderLock:
        """Keep other processes from writing here, until the lock is closed.

        Raises:
            BlockingIOError: if another process writes here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.path / LOCK)

    def write_json(self, name: str, data: Any) -> None:
        """Write plain data."""
        text = json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"
        self._replace(name, text.encode())

    def read_json(self, name: str) -> Any:
        """Return what ``write_json`` wrote, None if there is nothing.

        Raises:
            ValueError: if the file is damaged.
        """
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text("utf-8"))
        except ValueError as error:  # Not JSON, or not UTF-8.
            raise ValueError(f"{path} is damaged: {error}.") from error

    def write_checkpoint(self, name: str, state: Mapping[str, Any]) -> None:
        """Write tensors and plain data."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self._replace(name, buffer.getvalue())

    def read_checkpoint(self, name: str) -> Any:
        """Return what ``write_checkpoint`` wrote, None if there is nothing.

        It is unpickled, so read only checkpoints of your own.
        """
        path = self.path / name
        if not path.exists():
            return None
        return torch.load(path, map_location="cpu", weights_only=False)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a row to the progress.

        Raises:
            ValueError: if its columns differ from the file's.
        """
        path = self.path / PROGRESS
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(row) + "\n", "utf-8")
        with path.open("r", encoding="utf-8", newline="") as file:
            columns = file.readline().strip().split(",")
        if columns != list(row):
            raise ValueError(
                f"{path} has the columns {columns}, but the row has {list(row)}."
            )
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(row.values())

    def rows(self) -> list[dict[str, float]]:
        """Return the progress, oldest first; an incomplete last row is left out."""
        path = self.path / PROGRESS
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {name: float(value) for name, value in row.items()}
                for row in csv.DictReader(file)
                if None not in row.values()
            ]

    def keep_rows(self, count: int) -> None:
        """Drop rows after the first ``count``: those since the last checkpoint."""
        path = self.path / PROGRESS
        if path.exists():
            lines = path.read_text("utf-8").splitlines(keepends=True)
            self._replace(PROGRESS, "".join(lines[: count + 1]).encode())

    def _replace(self, name: str, data: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
