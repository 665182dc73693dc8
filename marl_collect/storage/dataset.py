"""Opens a dataset: its frames and episodes."""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from marl_collect.errors import DatasetError
from marl_collect.files.urls import url_of
from marl_collect.options import Option, require
from marl_collect.programs import notebooks
from marl_collect.storage.cache import Cache, cache_folder, open_cache, user_cache
from marl_collect.storage.card import card, episodes_table, groups_table
from marl_collect.storage.copying import fetch
from marl_collect.storage.description import (
    DatasetDescription,
    RunDescription,
    difference,
)
from marl_collect.storage.files import (
    BatchFile,
    list_files,
    naming,
    read_about,
    settled,
)
from marl_collect.storage.frames import Transitions
from marl_collect.storage.trajectories import Trajectories


@final
class Dataset:
    """The frames of one or several folders, in the order of their runs.

    Open a dataset with ``open_dataset``, and read its ``transitions`` or
    ``trajectories``. Both, every selection of keys, frames or episodes, and
    ``trajectories.sequences(length)`` have ``loader``.

    Attributes:
        name: its folders, for messages.
        files: as of opening.
        transitions: all frames, including those of episodes that did not end.
        description: what all batches have in common.
        runs: description of each run, by number.
    """

    def __init__(self, name: str, files: Sequence[BatchFile], cache: Cache) -> None:
        self.name, self.files = name, tuple(files)
        self.description, self.runs = _about(self.files)
        self.transitions = Transitions(
            name, cache, cache.columns, self.description, self.runs
        )

    def __len__(self) -> int:
        return len(self.transitions)

    @property
    def run_frames(self) -> list[int]:
        """Number of frames of each run."""
        return list(self.transitions.cache.state.runs.values())

    @cached_property
    def trajectories(self) -> Trajectories:
        """The complete episodes; reads their positions, but not their content."""
        return Trajectories(self.transitions, self.transitions.cache.episodes)

    def card(self) -> str:
        """Return what the dataset holds and how to load it, as Markdown."""
        return card(self.transitions, self.trajectories)

    def verify(self) -> None:
        """Decode all files again, and compare what the cache has.

        Raises:
            DatasetError: if a file is damaged, or the cache differs. It names what.
            FileNotFoundError: if a file vanished; open the dataset again.
        """
        self.transitions.cache.verify(self.files)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, task={self.description.task!r}, {len(self)} "
            f"frames, {len(self.trajectories)} episodes)"
        )

    def _repr_html_(self) -> str:
        """Show sizes, groups and episodes as tables in notebooks."""
        sizes = {"path": self.name, "frames": len(self), "runs": len(self.runs)}
        sizes["episodes"] = len(self.trajectories)
        about = notebooks.facts(self.description.task, sizes)
        groups = groups_table(self.description.environment)
        tables = groups, episodes_table(self.trajectories)
        return about + "".join(notebooks.table(*table) for table in tables)


def open_dataset(
    path: str | Path | Sequence[str | Path],
    *,
    cache: str | Path | None = None,
    **storage_options: Any,
) -> Dataset:
    """Open a dataset that ``record``, ``marl-collect collect`` or a ``Writer`` wrote.

    Args:
        path: a folder, or several of one kind, whose frames follow each other. Also
            URLs, such as ``"s3://bucket/data"``: new files are fetched to the cache.
        cache: folder for the decoded frames of any datasets, and for what is fetched.
            None: ``.cache`` in the dataset's folder if it can be written, else one in
            ``$XDG_CACHE_HOME``.
        storage_options: arguments of the fsspec file systems of URLs.

    Raises:
        FileNotFoundError: if a folder does not exist or has no batches, or if files
            vanish while they are read.
        NotADirectoryError: if it is a file.
        TypeError: if ``path`` has another type.
        ValueError: if two folders have the same run, or options have no URL.
        DatasetError: if a file is damaged or missing, or two files are of different
            kinds; names it.
        ImportError: if the package for a URL is missing. The message names it.
        OSError: if the cache cannot be written.
    """
    path = require("path", path, str | Path | Sequence[str | Path], Option(""))
    paths = [path] if isinstance(path, str | Path) else path
    if not paths:
        raise ValueError("There are no folders to open.")
    names = [url_of(folder) or str(Path(folder).absolute()) for folder in paths]
    if storage_options and not any(map(url_of, names)):
        raise ValueError(
            f"{path} is no URL: {', '.join(storage_options)} are for URLs."
        )
    home = Path(cache).absolute() if cache else user_cache()
    folders = [
        fetch(name, home, **storage_options) if url_of(name) else Path(name)
        for name in names
    ]
    list_all = partial(_list_all, folders)
    # One URL is decoded where its files are.
    prefer_home = bool(cache) and not url_of(names[0])
    cache_path = cache_folder(folders, home, prefer_home=prefer_home)
    return settled(lambda: Dataset(", ".join(names), *open_cache(list_all, cache_path)))


def _list_all(folders: Sequence[Path]) -> list[BatchFile]:
    files: list[BatchFile] = []
    of_runs: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            kind = NotADirectoryError if folder.exists() else FileNotFoundError
            raise kind(f"{folder} is not a folder of a dataset.")
        listed = list_files(folder)
        if not listed:
            raise FileNotFoundError(f"{folder} has no batches of a dataset.")
        for file in listed:
            other = of_runs.setdefault(file.run, folder)
            if other is not folder:  # One folder may be passed twice.
                raise ValueError(
                    f"The run {file.run} is in {other} and in {folder}, so its "
                    "episodes would be read twice."
                )
        files += listed
    return files


def _about(
    files: Sequence[BatchFile],
) -> tuple[DatasetDescription, tuple[RunDescription, ...]]:
    """Return the descriptions of the dataset and of its runs."""
    runs = []
    for file in files:
        if file.first:
            continue
        with naming(file.path):
            _, about = read_about(file.path)
            runs.append(RunDescription.from_json(about["run"]))
            says = about["description"]
            if file is files[0]:
                expected, description = says, DatasetDescription.from_json(says)
        text = difference(expected, says)
        if text:
            raise DatasetError(
                f"{file.path} does not fit {files[0].path}: {text}. A dataset has one "
                "task, with equal settings and spaces."
            )
    return description, tuple(runs)
