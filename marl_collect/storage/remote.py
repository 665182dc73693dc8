"""Datasets in object stores, through fsspec: read by URL, written by ``copy``."""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from marl_collect.storage.checks import DatasetError, Folder

_BLOCK: Final = 2**16
"""Bytes that are fetched at least: in a store, a request takes as long as 1 MB."""
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

    What is read is copied in blocks to files with holes in a temporary folder of this
    machine, at the same positions, and stays there until the folder is removed.

    Attributes:
        url: of the folder.
        options: arguments of the fsspec file system.
        blocks: for each file, which of its blocks were copied.
    """

    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: dict[str, bytearray] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether only this process and its children can change the files."""
        return True

    def named(self, *parts: str) -> str:
        """Return the URL of a file."""
        return "/".join((self.url, *parts))

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        store, root = self.store()
        store.invalidate_cache()
        return bool(store.exists(f"{root}/{name}"))

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            DatasetError: if it is missing.
        """
        store, root = self.store()
        with self._found(name):
            return bytes(store.cat_file(f"{root}/{name}"))

    def locate(self, name: str, size: int = 0) -> os.stat_result:
        """Find the local file for a file of the store, and make it if there is none."""
        path = self.path / name
        if name not in self.blocks:
            with path.open("ab") as file:
                file.truncate(size)
            self.blocks[name] = bytearray(-(-size // _BLOCK))
        return super().locate(name, size)

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Copy ranges of the bytes of a file, except what was copied before.

        Raises:
            DatasetError: if the file is missing, or ends before a range.
        """
        blocks = self.blocks[name]
        size = (self.path / name).stat().st_size
        missing = sorted(
            {
                block
                for begin, end in ranges
                for block in range(begin // _BLOCK, -(-end // _BLOCK))
                if not blocks[block]
            }
        )
        begins: list[int] = []
        ends: list[int] = []
        for block in missing:
            first, last = block * _BLOCK, min(size, (block + 1) * _BLOCK)
            if ends and ends[-1] == first:
                ends[-1] = last
            else:
                begins.append(first)
                ends.append(last)
        if not begins:
            return
        store, root = self.store()
        paths = [f"{root}/{name}"] * len(begins)
        with self._found(name):
            contents = store.cat_ranges(paths, begins, ends, on_error="raise")
        with (self.path / name).open("r+b") as file:
            for begin, end, content in zip(begins, ends, contents, strict=True):
                if len(content) != end - begin:
                    raise DatasetError(
                        f"{self.named(name)} ends before byte {end:,}, but the journal "
                        f"lists {size:,} bytes: it was truncated or changed."
                    )
                file.seek(begin)
                file.write(content)
        for block in missing:
            blocks[block] = 1

    @contextmanager
    def _found(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DatasetError(
                f"{self.named(name)} is missing, but the dataset needs it."
            ) from error

    def upload(self, path: Path, name: str) -> None:
        """Replace a file by a file of this machine."""
        store, root = self.store()
        store.put_file(str(path), f"{root}/{name}")

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
