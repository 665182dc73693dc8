"""The folder of one run: configuration, progress, checkpoints and results.

==========================  ===================================================
file                        contents
==========================  ===================================================
``config.json``             task, setup, seed, options, versions
``progress.csv``            a row per batch: losses, returns, speed
``evaluations.json``        all evaluations, with each episode's return
``episodes.json``           episodes so far of an evaluation that takes long
``checkpoints/last.pt``     the state that resuming needs
``checkpoints/best.pt``     the networks of the best evaluation
``events.out.tfevents.*``   the metrics for TensorBoard, if tensorboardX is installed
``logger.json``             names of the log that another logger writes instead
``videos/``                 evaluation episodes, if requested
``result.json``             results of the finished run
``.lock``                   held by the process that trains
==========================  ===================================================
"""

import csv
import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

from marl_collect.core.closing import Closing
from marl_collect.files.atomic import named_if_full, sync, write_atomically
from marl_collect.files.locks import LOCK, FolderLock
from marl_collect.models.saved_policy import CONFIG as CONFIG  # noqa: PLC0414 - exports
from marl_collect.models.saved_policy import read_tensors, write_tensors

PROGRESS = "progress.csv"
EVALUATIONS = "evaluations.json"
RESULT = "result.json"
EPISODES = "episodes.json"
LOGGER = "logger.json"
LAST = "checkpoints/last.pt"


@final
class RunFolder:
    """Reads and writes the files of one run.

    Files are replaced atomically, so they are complete even if the process is killed.
    Rows of ``progress.csv`` are appended one by one.

    Args:
        path: the folder; created with its first file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def has_progress(self) -> bool:
        """Whether the run has a checkpoint or a result, which resuming would keep."""
        return any((self.path / name).exists() for name in (LAST, RESULT))

    def lock(self) -> FolderLock:
        """Lock the folder against other processes, until the lock is closed.

        Raises:
            BlockingIOError: if another process has locked it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.path / LOCK)

    def write_json(self, name: str, data: Any) -> None:
        """Write plain data to a JSON file."""
        self._replace(
            name, json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"
        )

    def read_json(self, name: str) -> Any:
        """Return what ``write_json`` wrote, or None if there is no such file.

        Raises:
            ValueError: if the file is damaged.
        """
        path = self.path / name
        if not path.exists():
            return None
        return read_json(path)

    def write_checkpoint(self, name: str, state: Mapping[str, Any]) -> None:
        """Write tensors and plain data to a checkpoint file.

        The rows of ``progress.csv`` reach the disk before it, because resuming from the
        checkpoint needs them.
        """
        if (self.path / PROGRESS).exists():
            sync(self.path / PROGRESS, os.O_RDWR)
        write_tensors(self.path / name, state)

    def read_checkpoint(self, name: str) -> Any:
        """Return what ``write_checkpoint`` wrote, or None if there is no such file.

        It has tensors and plain data only, so reading it runs no code.

        Raises:
            ValueError: if the file is damaged.
        """
        path = self.path / name
        if not path.exists():
            return None
        state = read_tensors(path)
        if not isinstance(state, dict):
            raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument
                f"{path} is damaged: it holds a {type(state).__name__}."
            )
        return state

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to ``progress.csv``.

        Raises:
            ValueError: if the file has other columns.
        """
        path = self.path / PROGRESS
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            with named_if_full(path):
                path.write_text(",".join(row) + "\n", "utf-8")
        with path.open("r", encoding="utf-8", newline="") as file:
            columns = file.readline().strip().split(",")
        if columns != list(row):
            raise ValueError(
                f"{path} has the columns {columns}, but the row has {list(row)}."
            )
        with named_if_full(path), path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(row.values())

    def rows(self) -> list[dict[str, float]]:
        """Return the rows of ``progress.csv``, without an incomplete last row."""
        path = self.path / PROGRESS
        return read_rows(path) if path.exists() else []

    def keep_rows(self, count: int) -> None:
        """Keep the first ``count`` rows and delete those after the last checkpoint.

        Raises:
            ValueError: if the file has fewer rows.
        """
        path = self.path / PROGRESS
        if not count:
            path.unlink(missing_ok=True)
            return
        text = path.read_text("utf-8", "replace") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        if len(lines) <= count:
            raise ValueError(
                f"{path} is damaged: the checkpoint was written after {count} rows, "
                f"but the file has {max(0, len(lines) - 1)}. Delete the run's folder "
                "to train it again."
            )
        self._replace(PROGRESS, "".join(lines[: count + 1]))

    def _replace(self, name: str, data: str | bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: if the file is damaged; names it.
    """
    try:
        with open_regular(path) as file:
            return json.loads(file.read().decode("utf-8"))
    except ValueError as error:  # Not JSON, or not UTF-8.
        raise ValueError(
            f"{path} is damaged: {error}. Delete a run's folder to train it again."
        ) from error


def open_regular(path: Path) -> IO[bytes]:
    """Open a file of a run, which somebody else may have made, for reading.

    A link may lead to any file of the reader, and a pipe or a device has no end.

    Raises:
        OSError: if it is a link or no regular file; names it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                error.errno, "This is a link, not a file", str(path)
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "This is not a regular file", str(path))
    return file


def write_table(folder: str | Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write ``progress.csv`` of a training loop, as a whole or not at all.

    Args:
        folder: of the file.
        rows: the columns' names, then numbers.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / PROGRESS, text.getvalue())


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a table of numbers (CSV), without an incomplete last row.

    Raises:
        ValueError: if a value is not a number; names the file.
    """
    with open_regular(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
        lines = [line for line in text if line.endswith("\n")]
    try:
        names, *rows = list(csv.reader(lines)) or [[]]
        return [
            {name: float(value) for name, value in zip(names, row, strict=True)}
            for row in rows
        ]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error


@final
class EventWriter(Closing):
    """Writes metrics for TensorBoard; does nothing if tensorboardX is not installed.

    Args:
        path: folder of the events file.
    """

    def __init__(self, path: Path) -> None:
        self._writer: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(path))

    def add(self, metrics: Mapping[str, float], frames: int) -> None:
        """Write all metrics that are finite."""
        if self._writer is not None:
            for name, value in metrics.items():
                if name != "frames" and math.isfinite(value):
                    self._writer.add_scalar(name, value, frames)

    def close(self) -> None:
        """Close the events file."""
        if self._writer is not None:
            self._writer.close()
