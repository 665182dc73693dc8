"""Size and time of an export to Minari of short episodes, which cost most.

The size of the dataset itself, and of Minari's groups of each episode without any data,
are beside it: the latter is the least that Minari's format can take.
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
from marl_collect.storage import Dataset, export_minari

EPISODES = 2000
MINARI_ID = "short-v0"


@functools.cache
def dataset() -> Dataset:
    """Return a dataset of five agents with episodes of three to nine frames."""
    lengths = CountingOptions(min_length=3, max_length=9)
    path = folder() / "short"
    return record(path, partial(CountingEnv, lengths), episodes=EPISODES, seed=0)


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
    """Return the export, beside a copy of the dataset."""
    copy, file = folder() / "short, copy", folder() / "groups.hdf5"
    exported = folder() / "minari" / MINARI_ID
    return {
        "copy of the dataset": written(
            partial(shutil.copytree, dataset().path, copy), copy
        ),
        "minari": written(partial(export_minari, dataset(), MINARI_ID), exported),
        "minari, groups without data": written(partial(groups_of_minari, file), file),
    }


def cases() -> list[Case]:
    """Return one row."""
    title = f"export, {EPISODES:,} episodes"
    return [Case(title, exporting, "export", "s", clock=time.perf_counter)]
