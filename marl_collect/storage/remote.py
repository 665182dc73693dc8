"""Datasets in object stores, through fsspec: read by URL, written by ``copy``."""

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from marl_collect.files.atomic import named_if_full
from marl_collect.storage.checks import DatasetError, Folder

_BLOCK: Final = 2**16
"""Bytes that are fetched at least: in a store, a request takes as long as 1 MB."""
_PIECE: Final = 2**21
"""Most bytes of a request: longer ranges are fetched in pieces at the same time."""
_AT_ONCE: Final = 64
"""Requests at the same time; what they fetch is in memory until it is written."""
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)")


def url_of(path: str | Path) -> str | None:
    """Return a URL without its last slash; None if ``path`` is a folder here.

    A ``Path`` has removed one of the two slashes.
    """
    match = _URL.fullmatch(str(path))
    return f"{match[1]}://{match[2].rstrip('/')}" if match else None


def check_local(path: str | Path) -> None:
    """Check that ``path`` is not a URL.

    Raises:
        ValueError: if it is.
    """
    url = url_of(path)
    if url is not None:
        raise ValueError(
            f"{url} is a URL, but only folders of this machine are written to, because "
            "object stores have no locks. Write to a folder: "
            f"`marl-collect copy FOLDER {url}` copies a dataset, and later the batches "
            "that were added."
        )


@final
@dataclass(frozen=True)
class RemoteFolder(Folder):
    """The folder of a dataset in an object store.

    What is read is copied in blocks to files with holes in a folder of this machine, at
    the same positions. A temporary folder is removed with this object; a cache stays.

    Attributes:
        url: of the folder.
        options: arguments of the fsspec file system.
        blocks: for each file, which of its blocks were copied. They are mapped from the
            file ``NAME.blocks``, which all processes with the same folder share.
        cached: for each file, its name in a cache; empty without one.
    """

    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: dict[str, memoryview] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the maps; another process makes its own."""
        return self.__dict__ | {"blocks": {}}

    def keep(self, digests: Mapping[str, str]) -> None:
        """Use files of a cache from now on.

        Args:
            digests: for each file, a text that is different for other content.
        """
        for name, digest in digests.items():
            text = f"{self.url}/{name} {digest}".encode()
            self.cached[name] = hashlib.sha256(text).hexdigest()

    def local(self, name: str) -> Path:
        """Return where a file, or what was fetched of it, is on this machine."""
        return self.path / self.cached.get(name, name)

    def named(self, *parts: str) -> str:
        """Return the URL of a file, and where it is cached, to delete it if damaged."""
        url = "/".join((self.url, *parts))
        cached = self.cached.get("/".join(parts))
        if not cached:
            return url
        return f"{url} (cached in {self.path / cached}: delete that to fetch it again)"

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
        with self._existing(name):
            return bytes(store.cat_file(f"{root}/{name}"))

    def locate(self, name: str, size: int = 0) -> os.stat_result:
        """Find the local file for a file of the store, and make it if there is none."""
        if name not in self.blocks:
            path, count = self.local(name), -(-size // _BLOCK)
            done = path.with_name(f"{path.name}.blocks")
            if not path.exists():  # A user deleted what was damaged.
                done.unlink(missing_ok=True)
            for made, nbytes in (path, size), (done, count):
                with made.open("ab") as file:  # Files of other sizes have other names.
                    file.truncate(nbytes)
            import torch

            blocks = torch.from_file(
                str(done), shared=True, size=count, dtype=torch.uint8
            )
            self.blocks[name] = blocks.numpy().data
        return super().locate(name, size)

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Copy ranges of the bytes of a file, except what was copied before.

        Raises:
            DatasetError: if the file is missing, or ends before a range.
        """
        blocks = self.blocks[name]
        size = self.local(name).stat().st_size
        missing = sorted(
            {
                block
                for begin, end in ranges
                for block in range(begin // _BLOCK, -(-end // _BLOCK))
                if not blocks[block]
            }
        )
        pieces: list[tuple[int, int]] = []
        for block in missing:
            begin, end = block * _BLOCK, min(size, (block + 1) * _BLOCK)
            if pieces and pieces[-1][1] == begin and end - pieces[-1][0] <= _PIECE:
                pieces[-1] = pieces[-1][0], end
            else:
                pieces.append((begin, end))
        for i in range(0, len(pieces), _AT_ONCE):
            some = pieces[i : i + _AT_ONCE]
            self._fetch(name, some, size)
            for begin, end in some:
                first, last = begin // _BLOCK, -(-end // _BLOCK)
                blocks[first:last] = b"\1" * (last - first)

    def _fetch(self, name: str, pieces: Sequence[tuple[int, int]], size: int) -> None:
        """Copy pieces of a file, all at the same time."""
        store, root = self.store()
        begins, ends = (list(positions) for positions in zip(*pieces, strict=True))
        paths = [f"{root}/{name}"] * len(pieces)
        with self._existing(name):
            contents = store.cat_ranges(paths, begins, ends, on_error="raise")
        local = self.local(name)
        with named_if_full(local), local.open("r+b") as file:
            for begin, end, content in zip(begins, ends, contents, strict=True):
                if len(content) != end - begin:
                    raise DatasetError(
                        f"{self.named(name)} ends before byte {end:,}, but the journal "
                        f"lists {size:,} bytes: it was truncated or changed."
                    )
                file.seek(begin)
                file.write(content)
            if self.cached:  # After a power failure no block is listed without content.
                file.flush()
                os.fdatasync(file.fileno())

    @contextmanager
    def _existing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DatasetError(
                f"{self.named(name)} is missing, but the dataset needs it."
            ) from error

    def upload(self, files: Mapping[str, Path]) -> None:
        """Replace files, by name, by files of this machine, all at the same time."""
        store, root = self.store()
        targets = [f"{root}/{name}" for name in files]
        store.put([str(path) for path in files.values()], targets)

    def store(self) -> tuple[Any, str]:
        """Return this process's fsspec file system, and the folder's path in it."""
        import fsspec

        return fsspec.url_to_fs(self.url, **self.options)


def open_folder(
    path: str | Path,
    options: Mapping[str, Any] | None,
    cache: str | Path | None = None,
) -> Folder:
    """Return a folder of this machine, or one in an object store for a URL.

    Args:
        path: a folder or a URL.
        options: arguments of the fsspec file system.
        cache: folder for what is fetched, see ``RemoteFolder.keep``; None makes a
            temporary one.

    Raises:
        ImportError: if the package for the URL is missing. It says what to install.
        ValueError: if there is no such kind of URL, or ``options`` or ``cache`` for a
            local folder.
    """
    url = url_of(path)
    if url is None:
        if options:
            raise ValueError(f"{path} is no URL: storage_options are for URLs only.")
        if cache is not None:
            raise ValueError(f"{path} is no URL: a cache is for URLs only.")
        return Folder(Path(path).absolute())  # A later chdir has no effect.
    if cache is None:
        copies = Path(tempfile.mkdtemp(prefix="marl_collect-"))
    else:
        copies = Path(cache).absolute()
        copies.mkdir(parents=True, exist_ok=True)
    folder = RemoteFolder(copies, url, dict(options or {}))
    if cache is None:
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
