"""Copies datasets between folders and object stores, through fsspec."""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from marl_collect.errors import DatasetError
from marl_collect.files.atomic import named_if_full, sync, sync_folder
from marl_collect.files.urls import url_of
from marl_collect.storage.columns import Column, described
from marl_collect.storage.description import DatasetDescription
from marl_collect.storage.files import (
    BatchFile,
    arranged,
    check_kind,
    check_target,
    read_about,
    settled,
)

_CARD: Final = "README.md"


def copy(source: str | Path, target: str | Path, **storage_options: Any) -> int:
    """Copy the files of a dataset that a target lacks, by name and size.

    Each file appears when it is complete, and those of a run in their order, so the
    target is a dataset at any time. Run it again after an interruption, or when the
    dataset has grown. A writer may have the source open. Small files of the target that
    the source has joined are removed. ``README.md`` is copied if the target has none.

    Args:
        source: a folder, or a URL such as ``"s3://bucket/data"``.
        target: a folder or a URL; a folder is created.
        storage_options: arguments of the fsspec file systems of URLs.

    Returns:
        The number of files that were copied.

    Raises:
        FileNotFoundError: if the source has no batches.
        ValueError: if the target holds a dataset of another kind, or there are options
            but no URL.
        FileExistsError: if the target is a folder that holds something else.
        DatasetError: if a file is missing or damaged; names it.
        ImportError: if the package for a URL is missing. The message names it.
        OSError: if something cannot be read or written.
    """
    origin = _Location.of(source, storage_options)
    goal = _Location.of(target, storage_options)
    if storage_options and origin.is_local and goal.is_local:
        raise ValueError(
            f"Neither {source} nor {target} is a URL, but there are options for URLs: "
            f"{', '.join(storage_options)}."
        )
    if goal.is_local:
        check_target(Path(goal.root))
    return _copy(origin, goal, mirror=False)


def fetch(url: str, cache: Path, **storage_options: Any) -> Path:
    """Return a folder in ``cache`` with the files of a dataset in an object store."""
    origin = _Location.of(url, storage_options)
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Others wait instead of fetching it too.
        _copy(origin, _Location.of(folder, {}), mirror=True)
    return folder


def check_url(url: str, description: DatasetDescription) -> None:
    """Check that batches of this description may be copied to a URL."""
    target = _Location.of(url, {})
    files = target.listed(check=False)[1]
    if files:
        _, there = target.about(files[0].path.name)
        check_kind(target.name, there.get("description"), description.to_json())


@final
@dataclass(frozen=True)
class _Location:
    """A folder of this machine or a path in an fsspec file system."""

    name: str
    store: Any
    root: str
    is_local: bool

    @classmethod
    def of(cls, path: str | Path, options: Mapping[str, Any]) -> Self:
        import fsspec

        url = url_of(path)
        name = url or str(Path(path).absolute())
        try:
            with _named(name):
                store, root = fsspec.url_to_fs(name, **(options if url else {}))
        except ImportError as error:
            raise ImportError(
                f"{name} needs a package that is not installed: {error} For S3: "
                'pip install "marl-collect[cloud]"'
            ) from error
        return cls(name, store, root, is_local=url is None)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def listed(self, *, check: bool = True) -> tuple[dict[str, int], list[BatchFile]]:
        """Return the size of every file of a dataset, and the files with batches."""
        with _named(self.name):
            self.store.invalidate_cache()
            entries = []
            with suppress(FileNotFoundError):
                entries = self.store.ls(self.root, detail=True)
        sizes = {}
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if name == _CARD or (name.endswith(".parquet") and name[0] != "."):
                sizes[name] = entry["size"]
        files = self.files(sizes, check=check)
        if check and not files:
            raise FileNotFoundError(f"{self.name} has no batches of a dataset.")
        return sizes, files

    def files(self, names: Iterable[str], *, check: bool) -> list[BatchFile]:
        paths = (Path(self.root, name) for name in names if name != _CARD)
        return arranged(paths, self.name, check=check)

    def about(self, name: str) -> tuple[tuple[Column, ...], dict[str, Any]]:
        """Return the columns of a file, and what its writer said about it."""
        with _named(self.name), self.store.open(self.path(name)) as file:
            return read_about(Path(self.name, name), file)


def _copy(origin: _Location, goal: _Location, *, mirror: bool) -> int:
    """Copy what is missing, and return how many files.

    A mirror loses what the origin has no more, and may become of another kind.
    """
    count = 0
    while True:
        sizes, files = settled(origin.listed, DatasetError)
        there, before = goal.listed(check=False)
        names = [file.path.name for file in files]
        missing = [name for name in names if there.get(name) != sizes[name]]
        if _CARD in sizes and _CARD not in there:
            missing.append(_CARD)
        # What a cache has decoded of small files is valid for a file that joins them.
        lasts = {(file.run, file.last): file.path for file in before}
        likes = {file.path.name: lasts.get((file.run, file.last)) for file in files}
        try:
            if missing and before and not mirror:
                columns, about = goal.about(before[0].path.name)
                new, about_new = origin.about(names[0])
                says, says_new = (a.get("description") for a in (about, about_new))
                check_kind(goal.name, says, says_new)
                check_kind(goal.name, described(columns), described(new))
            for name in missing:
                _transfer(origin, goal, name, sizes[name], likes.get(name))
                count += 1
        except FileNotFoundError:
            if sizes.keys() <= origin.listed(check=False)[0].keys():
                raise
            continue  # A writer has joined files meanwhile.
        kept = files if mirror else goal.files(there | sizes, check=False)
        for name in there.keys() - {file.path.name for file in kept} - {_CARD}:
            with _named(goal.name), suppress(FileNotFoundError):
                goal.store.rm_file(goal.path(name))
        return count


def _transfer(
    origin: _Location, goal: _Location, name: str, size: int, like: Path | None
) -> None:
    """Copy a file; it appears when it is complete.

    ``like`` has the same last batch. A local file gets its time, unless it replaces it.
    """
    if not goal.is_local and not origin.is_local:
        with tempfile.TemporaryDirectory() as between:
            middle = _Location.of(between, {})
            _transfer(origin, middle, name, size, None)
            _transfer(middle, goal, name, size, None)
        return
    if not goal.is_local:
        with _named(goal.name):
            goal.store.put_file(origin.path(name), goal.path(name))
        return
    folder = Path(goal.root)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{secrets.token_hex(4)}.{name}.tmp"
    try:
        with _named(origin.name), named_if_full(folder / name):
            origin.store.get_file(origin.path(name), str(temporary))
        if temporary.stat().st_size != size:
            raise OSError(f"{origin.name}/{name} was changed while it was copied.")
        if like is None or like.name == name:
            like = Path(origin.path(name)) if origin.is_local else temporary
        time = like.stat().st_mtime_ns
        os.utime(temporary, ns=(time, time))
        sync(temporary, os.O_RDWR)
        temporary.replace(folder / name)
        sync_folder(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the place in errors of its store, which are of any kind."""
    try:
        yield
    except (OSError, ImportError, DatasetError):
        raise
    except Exception as error:
        raise OSError(
            f"{name} cannot be read or written: {type(error).__name__}: {error}"
        ) from error
