"""Joins datasets of one kind: as a view, or written to a new folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marl_collect.storage.appending import DatasetFiles
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import Metadata, difference
from marl_collect.storage.files import check_unlocked, completed
from marl_collect.storage.index import key_difference
from marl_collect.storage.remote import check_local


def concatenate(datasets: Sequence[Dataset | str | Path]) -> Dataset:
    """Return a view over several datasets, which reads like one; nothing is copied.

    Episodes, frames and runs are in the order of ``datasets``.

    Args:
        datasets: at least one, or their folders, of one kind: task, environment
            settings, groups, spaces and keys are equal.

    Raises:
        ValueError: if there are none, or two are of different kinds. The message names
            the first difference.
        FileNotFoundError: if a folder holds no dataset.
    """
    if isinstance(datasets, str | Path | Dataset) or not datasets:
        raise ValueError(
            f"datasets is {datasets!r}, but must be a list of datasets or of folders."
        )
    opened = [d if isinstance(d, Dataset) else open_dataset(d) for d in datasets]
    for other in opened[1:]:
        _check_alike(opened[0], other)
    return Dataset([part for each in opened for part in each.parts])


def merge(datasets: Sequence[Dataset | str | Path], path: str | Path) -> Dataset:
    """Write the batches of several datasets to a new one.

    Batches are checked and copied as they are. The folder appears when it is complete:
    if the process is killed, a hidden folder ``.NAME.incomplete`` stays beside it,
    which the next merge to the same path removes.

    Args:
        datasets: as for ``concatenate``.
        path: a folder that does not exist, or is empty.

    Returns:
        The new dataset, opened. Its metadata are those of the first one that has any.

    Raises:
        ValueError: if there are none, or two are of different kinds.
        DatasetError: if a file of them is damaged. It names the file.
        FileExistsError: if something is at ``path``.
        BlockingIOError: if a writer has one of the datasets open, or another process
            merges to the same path.
    """
    check_local(path)
    joined = concatenate(datasets)
    target = Path(path).absolute()
    for source, _ in joined.parts:
        check_unlocked(source.path)
    with completed(target, "merge", or_empty=True) as temporary:
        temporary.mkdir()
        _write(joined, temporary)
    return open_dataset(target)


def _write(joined: Dataset, folder: Path) -> None:
    """Write the batches to an empty folder."""
    batch = 0
    with DatasetFiles(folder, joined.contents.description, durable=False) as files:
        if joined.contents.metadata != Metadata():
            files.note({"metadata": joined.contents.metadata.to_json()})
        for _, contents in joined.parts:
            runs = len(files.index.runs)
            for run in contents.runs:
                files.note({"run": run.to_json()})
            if contents.keys and not files.index.keys:
                files.note({"keys": [key.to_json() for key in contents.keys]})
            for entry in contents.batches:
                content = joined.stored_bytes(batch)
                files.add(replace(entry, run=runs + entry.run), [content])
                batch += 1


def _check_alike(first: Dataset, other: Dataset) -> None:
    expected, found = first.contents, other.contents
    different = difference(
        expected.description.to_json(), found.description.to_json()
    ) or (
        key_difference(expected.keys, found.keys)
        if expected.keys and found.keys  # A dataset without batches has none.
        else None
    )
    if different is not None:
        name, there, here = different
        raise ValueError(
            f"{other.name} and {first.name} are of different kinds: {name} is {here} "
            f"in the former, but {there} in the latter. Datasets that are joined need "
            "the same task, settings, groups, spaces and keys."
        )
