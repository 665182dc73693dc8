"""Writes some of the episodes of a dataset as another one."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.files.folders import completed
from marl_collect.storage.columns import DONE, to_table
from marl_collect.storage.files import BatchFile, file_name, new_run, write_table
from marl_collect.storage.frames import Frames
from marl_collect.storage.numbering import ranges, starts

_FILE_BYTES: Final = 2**26
"""Decoded size of a file: what writing and reading one hold in memory."""


def save(frames: Frames, episodes: NDArray[Any], path: Path) -> None:
    """Write rows of ``Cache.episodes``, with the selected keys; see ``Trajectories``.

    Each run gets a new name, so files of several selections may be in one folder. Its
    description stays, so its episodes keep their seeds.
    """
    missing = {TRAJ_IDS, DONE} - {column.key for column in frames.keys}
    if missing:
        raise KeyError(f"Datasets need the keys {sorted(missing)}: select them too.")
    if not len(episodes):
        raise ValueError(f"There are no episodes of {frames.name} to save.")
    size = sum(column.nbytes for column in frames.keys)
    description = frames.description.to_json()
    with completed(path, "save", or_empty=True) as temporary:
        temporary.mkdir()
        folder = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        saved: list[BatchFile] = []
        try:
            for run in np.unique(episodes["run"]).tolist():
                rows = episodes[episodes["run"] == run]
                name = new_run(saved)
                saved.append(BatchFile(name, 0, 0, path))
                about = {"description": description, "run": frames.runs[run].to_json()}
                ends = starts(rows["length"])[1:] * size // _FILE_BYTES
                cuts = np.flatnonzero(np.diff(ends)) + 1
                for number, part in enumerate(np.split(rows, cuts)):
                    index = ranges(np.zeros(len(part), np.int64), part["length"])
                    numbers = frames.numbers(part["first"], part["length"])
                    values = frames.stored(numbers)
                    table = to_table(values, name, index.astype(np.int32), about)
                    target = file_name(name, number, number)
                    write_table(table, target, folder, path)
        finally:
            os.close(folder)
