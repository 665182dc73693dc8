"""Sizes and times of exports and imports of short episodes, which cost most.

A row has all formats that can be exported and whose packages are installed. The size of
the dataset itself, and of Minari's groups of each episode without any data, are beside
them: the latter is the least that Minari's format can take.
"""

import functools
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from harness.turns import Alternative
from workloads.counting import CountingEnv, CountingOptions

from cases.case import Case
from cases.datasets import folder, remove, size
from marl_collect import record
from marl_collect.storage import Dataset, export_dataset, import_dataset
from marl_collect.storage.formats import FORMATS
from marl_collect.storage.formats.registry import find_format

EPISODES = 2000
MINARI_ID = "short-v0"


@functools.cache
def dataset() -> Dataset:
    """Return a dataset of five agents with episodes of three to nine frames."""
    lengths = CountingOptions(min_length=3, max_length=9)
    path = folder() / "short"
    return record(path, partial(CountingEnv, lengths), episodes=EPISODES, seed=0)


def formats() -> list[str]:
    """Return the names of the formats that can be exported here."""
    names = []
    for name in FORMATS:
        try:
            if find_format(name).export is not None:
                names.append(name)
        except ImportError:
            continue
    return names


def target(name: str) -> Path:
    """Return where the export of a format lies; Minari has one folder for all."""
    if name == "minari":
        return folder() / "minari" / MINARI_ID
    return folder() / f"short, {name}"


def export(name: str) -> None:
    """Export the dataset."""
    to = MINARI_ID if name == "minari" else str(target(name))
    export_dataset(dataset(), to, name)


def groups_of_minari(file: Path) -> None:
    """Write Minari's groups of each episode, without any data."""
    import h5py

    with h5py.File(file, "w", track_order=True, libver="latest") as h5_file:
        for number in range(EPISODES):
            episode = h5_file.create_group(f"episode_{number}")
            episode.attrs["id"], episode.attrs["total_steps"] = number, 0
            for name in ("observations", "actions", "infos"):
                for group in ("hunter", "prey"):
                    episode.create_group(f"{name}/{group}")


def written(call: Callable[[], object], path: Path) -> Alternative:
    """Return the alternative of writing to a path."""
    return Alternative(
        Alternative.once(call).call, partial(remove, path), partial(size, path)
    )


def exporting(_: ExitStack) -> dict[str, Alternative]:
    """Return the export of each format, beside a copy of the dataset."""
    copy = folder() / "short, copy"
    alternatives = {
        "copy of the dataset": written(
            partial(shutil.copytree, dataset().path, copy), copy
        )
    }
    for name in formats():
        alternatives[name] = written(partial(export, name), target(name))
    if "minari" in alternatives:
        file = folder() / "groups.hdf5"
        alternatives["minari, groups without data"] = written(
            partial(groups_of_minari, file), file
        )
    return alternatives


def importing(_: ExitStack) -> dict[str, Alternative]:
    """Return the import of each format."""
    alternatives = {}
    for name in formats():
        if name == "minari":  # It is only exported.
            continue
        if not target(name).exists():
            export(name)
        source = str(target(name))
        copy_path = folder() / f"short, {name}, again"
        alternatives[name] = written(
            partial(import_dataset, source, copy_path, name), copy_path
        )
    return alternatives


def cases() -> list[Case]:
    """Return two rows."""
    title = f"{EPISODES:,} episodes"
    return [
        Case(f"export, {title}", exporting, "export", "s", clock=time.perf_counter),
        Case(f"import, {title}", importing, "import", "s", clock=time.perf_counter),
    ]
