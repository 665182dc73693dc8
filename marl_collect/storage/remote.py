"""Datasets in object stores, through fsspec: read by URL, written by ``copy``."""

import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from marl_collect.storage.checks import DatasetError, Folder

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)")


def url_of(path: str | Path) -> str | None:
    """Return a URL without its last slash; None if ``path`` is a folder here.

    A ``Path`` has removed one of the two slashes.
    """
    found = _URL.fullmatch(str(path))
    return f"{found[1]}://{found[2].rstrip('/')}" if found else None


def check_local(path: str | Path) -> None:
    """Check that ``path`` is not a URL.

    Raises:
        ValueError: if it is.
    """
    url = url_of(path)
    if url is not None:
        raise ValueError(
            f"{url} is a URL, but a dataset is written to a folder of this machine, "
            "because object stores have no locks. Write to a folder, and copy it with "
            f"`marl-collect copy FOLDER {url}`; again for batches that are added."
        )


@final
@dataclass(frozen=True)
class RemoteFolder(Folder):
    """The folder of a dataset in an object store.

    Files are copied to a temporary folder of this machine when they are first used.

    Attributes:
        url: of the folder.
        options: arguments of the fsspec file system.
    """

    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def named(self, *parts: str) -> str:
        """Return the URL of a file."""
        return "/".join((self.url, *parts))

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        store, root = self.store()
        store.invalidate_cache()
        return bool(store.exists(f"{root}/{name}"))

    def locate(self, parts: Sequence[str]) -> tuple[Path, os.stat_result]:
        """Find the copy of a file, and make it if there is none.

        Raises:
            DatasetError: if it is missing, or its name leaves the folder.
        """
        if {"", ".", ".."}.intersection(parts):  # An object may have any name.
            raise DatasetError(f"{self.named(*parts)} is no name of a dataset's file.")
        path = self.path.joinpath(*parts)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
            store, root = self.store()
            try:
                store.get_file("/".join((root, *parts)), str(temporary))
                temporary.replace(path)  # Other processes may read the folder too.
            except FileNotFoundError as error:
                raise DatasetError(
                    f"{self.named(*parts)} is missing, but the dataset's index needs "
                    "it."
                ) from error
            finally:
                temporary.unlink(missing_ok=True)
        return super().locate(parts)

    def files(self, batch: str) -> list[tuple[str, ...]]:
        """Return the paths of all files of a batch, in this folder."""
        store, root = self.store()
        store.invalidate_cache()
        found = store.find(f"{root}/{batch}")
        return sorted(tuple(name[len(root) + 1 :].split("/")) for name in found)

    def upload(self, path: Path, parts: Sequence[str]) -> None:
        """Copy a file of this machine to the folder."""
        store, root = self.store()
        store.put_file(str(path), "/".join((root, *parts)))

    def store(self) -> tuple[Any, str]:
        """Return this process's fsspec file system, and the folder's path in it."""
        import fsspec

        return fsspec.url_to_fs(self.url, **self.options)


def open_folder(path: str | Path, options: Mapping[str, Any] | None) -> Folder:
    """Return a folder of this machine, or one in an object store for a URL.

    Raises:
        ImportError: if the package for the URL is missing. It says what to install.
        ValueError: if there is no such kind of URL, or ``options`` for a local folder.
    """
    url = url_of(path)
    if url is None:
        if options:
            raise ValueError(f"{path} is no URL: storage_options are for URLs only.")
        return Folder(Path(path).absolute())  # A later chdir has no effect.
    copies = Path(tempfile.mkdtemp(prefix="marl_collect-"))
    folder = RemoteFolder(copies, url, dict(options or {}))
    weakref.finalize(folder, _remove, copies, os.getpid())
    try:
        folder.store()
    except ImportError as error:
        raise ImportError(
            f"{url} needs a package that is not installed: {error} For S3: "
            'pip install "marl-collect[cloud]"'
        ) from error
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # Not in a fork, whose parent still reads.
        shutil.rmtree(folder, ignore_errors=True)
