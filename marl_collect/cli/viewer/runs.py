"""Folders of training runs as JSON values and pictures: curves, states, datasets."""

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final
from zlib import crc32

from marl_collect.files.log_file import LOG
from marl_collect.programs.printable import printable
from marl_collect.training.plots import Table, curves, svg, table_curves
from marl_collect.training.results import RANDOM, Run, read_random
from marl_collect.training.run_folder import (
    CONFIG,
    EVALUATIONS,
    PROGRESS,
    RESULT,
    open_regular,
    read_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RUN_FILES: Final = (CONFIG, EVALUATIONS, RESULT)
_FILES: Final = {*_RUN_FILES, PROGRESS, RANDOM, LOG}
_DATASET: Final = ".parquet"
"""Suffix of the files of a dataset."""
_HIDDEN: Final = ("episodes", "return_agent", "seconds_")
"""Columns of ``progress.csv`` that are not drawn, or their beginnings."""
_LINES: Final = 12
"""Lines of the newest log that are shown."""
_LOG_BYTES: Final = 2**16
"""Bytes at the end of a log in which these lines are."""
_MOST_BYTES: Final = 2**26
"""A larger file is not read: a million rows of a table have about as much."""
_Files = Mapping[Path, tuple[int, int]]
"""Time in nanoseconds and size in bytes of each file."""
_T = TypeVar("_T")
_Drawings = list[tuple[str, Callable[[], "Figure"]]]


@final
class Runs:
    """The runs below a folder.

    They may be training: every request looks for files, and reads those that changed.
    Somebody else may have made the folder, so no link is followed, and only regular
    files of a limited size are read.

    Args:
        folder: of ``compare``, of one of its runs, of a training loop that writes
            ``progress.csv``, whose first column is the horizontal axis, or above these.

    Raises:
        ValueError: if there is nothing of this kind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._datasets: list[Path] = []
        self._refused: dict[Path, str] = {}
        """Files that are not read, and why; of the last request."""
        self._contents: dict[Path, tuple[object, Any]] = {}
        """By path: the time and size of what was read, and its content."""
        if not self._files() and not self._refused:
            raise ValueError(
                f"{folder} has neither a dataset nor training runs. Expected the "
                "folder of a dataset, of `marl-collect compare`, or of a training "
                f"loop that writes {PROGRESS} with write_table."
            )
        # The stamp says which version of the files was drawn.
        self.figure = lru_cache(16)(self._figure)

    def about(self) -> dict[str, Any]:
        """Return what the page shows: names of figures, a row for each run, the log."""
        files = self._files()
        self._datasets += [
            path.parent
            for path in files
            if path.suffix == _DATASET and path.parent not in self._datasets
        ]
        drawings, rows = self._read(files)
        logs = [path for path in files if path.name == LOG]
        newest = max(logs, key=lambda path: files[path][0], default=None)
        text = _end(newest) if newest else ""
        drawn = {path: files[path] for path in files if path not in logs}
        return {
            "title": "Datasets" if self._datasets and not rows else "Training runs",
            "name": printable(str(self._folder)),
            "stamp": crc32(repr(drawn).encode()),
            "figures": [name for name, _ in drawings],
            "runs": rows,
            "log": text.splitlines()[-_LINES:],
            "datasets": [self._name(path) for path in self._datasets],
        }

    def dataset(self, index: int) -> Path:
        """Return the folder of a dataset in ``about``."""
        return self._datasets[index]

    def requests(self) -> Iterator[str]:
        """Yield the requests of the page."""
        about = self.about()
        yield "/about"
        for index in range(len(about["figures"])):
            yield f"/figure?index={index}&stamp={about['stamp']}"

    def _figure(self, index: int, stamp: int) -> bytes:
        del stamp  # The cache has it.
        drawings, _ = self._read(self._files())
        return svg(drawings[index][1]())

    def _files(self) -> _Files:
        """Return the files that are read."""
        files = {}
        self._refused = {}
        for folder, below, names in os.walk(self._folder):
            if "pyvenv.cfg" in names:  # A virtual environment.
                below.clear()
                continue
            below[:] = sorted(name for name in below if not name.startswith("."))
            # The last file of a dataset stands for it.
            data = [n for n in names if n.endswith(_DATASET) and n[0] != "."]
            for name in sorted({*_FILES.intersection(names), *sorted(data)[-1:]}):
                if name == CONFIG and not _is_run(folder, names):
                    continue
                path = Path(folder, name)
                try:
                    status = path.lstat()
                except FileNotFoundError:  # Replaced, or removed to begin again.
                    continue
                if why := _refusal(status, limited=name != LOG and name not in data):
                    self._refused[path] = why
                else:
                    files[path] = status.st_mtime_ns, status.st_size
        return files

    def _once(self, path: Path, stamp: object, read: Callable[[Path], _T]) -> _T:
        """Return what a file or folder has; read it only if its stamp is new."""
        before = self._contents.get(path)
        if before is None or before[0] != stamp:
            before = self._contents[path] = stamp, read(path)
        content: _T = before[1]
        return content

    def _name(self, path: Path) -> str:
        if path == self._folder:
            return "."
        return printable(str(path.relative_to(self._folder)))

    def _read(self, files: _Files) -> tuple[_Drawings, list[list[str]]]:
        """Return what can be drawn, and a row for each run, or for what is damaged."""
        comparisons: dict[Path, list[Run]] = {}
        tables: dict[str, dict[str, list[Table]]] = {}
        rows = [
            [self._name(path), "", "", "", f"This file {why}."]
            for path, why in self._refused.items()
        ]
        for folder in self._run_folders(files):
            here = [path for path in files if path.parent == folder]
            written = max(files[path][0] for path in here)
            try:
                run = None
                if folder / CONFIG in files:
                    stamps = [files.get(folder / name) for name in _RUN_FILES]
                    run = self._once(folder, stamps, Run.read)
                table: Table = []
                path = folder / PROGRESS
                if path in files:
                    table = self._once(path, files[path], _read_table)
                if table and len(table[0]) > 1:
                    title, setup, shown = self._drawn(folder, run, table)
                    tables.setdefault(title, {}).setdefault(setup, []).append(shown)
                rows.append([self._name(folder), *_cells(run, table, written)])
            except (ValueError, LookupError, TypeError, OSError) as error:
                clear = isinstance(error, (ValueError, OSError))
                text = str(error) if clear else f"{folder} is damaged: {error!r}"
                rows.append([self._name(folder), "", "", "", text])
                continue
            if run is not None and run.evaluations:
                comparisons.setdefault(folder.parents[1], []).append(run)
        drawings: _Drawings = []
        for folder, runs in comparisons.items():
            try:
                random = read_random(folder) if folder / RANDOM in files else None
            except (ValueError, OSError) as error:
                random = None
                rows.append([RANDOM, "", "", "", str(error)])
            title = f"{self._title(folder, runs[0])}: evaluations"
            drawings.append((title, partial(curves, runs, title, random, seeds=True)))
        for title, setups in tables.items():
            drawings.append((title, partial(table_curves, setups, title)))
        return drawings, rows

    def _run_folders(self, files: _Files) -> list[Path]:
        """Return the folders of runs, without those that have a refused file."""
        folders = {path.parent for path in files if path.name in (CONFIG, PROGRESS)}
        refused = (path.parent for path in self._refused if path.name != LOG)
        return sorted(folders.difference(refused))

    def _drawn(
        self, folder: Path, run: Run | None, table: Table
    ) -> tuple[str, str, Table]:
        """Return the title of a table's figure, its setup, and what is drawn of it."""
        if run is None:  # Tables with the same columns share a figure.
            seed = folder.name.startswith("seed") and folder != self._folder
            return (
                ", ".join(table[0]),
                self._name(folder.parent if seed else folder),
                table,
            )
        shown = [
            {name: x for name, x in row.items() if not name.startswith(_HIDDEN)}
            for row in table
        ]
        return f"{self._title(folder.parents[1], run)}: training", run.setup, shown

    def _title(self, comparison: Path, run: Run) -> str:
        below = self._folder in comparison.parents
        return f"{run.task} ({self._name(comparison)})" if below else run.task


def _refusal(status: os.stat_result, *, limited: bool) -> str | None:
    """Return why a file is not read; None if it is."""
    if stat.S_ISLNK(status.st_mode):
        return "is a link, which is not followed"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if limited and status.st_size > _MOST_BYTES:
        return f"is larger than {_MOST_BYTES:,} bytes"
    return None


def _end(path: Path) -> str:
    """Return the end of a log."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return str(error)


def _read_table(path: Path) -> Table:
    rows = read_rows(path)
    return [{printable(name): x for name, x in row.items()} for row in rows]


def _is_run(folder: str, names: Sequence[str]) -> bool:
    """Return whether a folder with ``config.json`` is of a run, which may just begin.

    Other programs write files of this name, too.
    """
    written = {EVALUATIONS, RESULT, PROGRESS}
    return Path(folder).name.startswith("seed_") or not written.isdisjoint(names)


def _cells(run: Run | None, table: Table, written: int) -> list[str]:
    """Return frames, returns in training and in evaluations, and the state of a run."""
    last = table[-1] if table else {}
    frames = f"{next(iter(last.values()), 0):,.0f}"
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written / 1e9))
    state = f"last written {clock}"
    if run is None:
        return [frames, "", "", state]
    score = run.evaluations[-1].team if run.evaluations else None
    if run.best is not None:
        state, score = "finished", run.best.team
    return [
        f"{frames} of {int(run.options['frames']):,}",
        f"{last['return_team']:.4g}" if last else "",
        "" if score is None else f"{score:.4g}",
        state,
    ]
