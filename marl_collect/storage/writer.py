"""Adds batches to a dataset; complete batches stay readable after any crash.

A batch is written under a temporary name, synced, renamed, and then listed in the
index. If the writer is killed in between, an unlisted folder remains. The next writer
removes it.
"""

import contextlib
import copy
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import torch
from tensordict import TensorDictBase

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.core.closing import Closing
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import flatten
from marl_collect.errors import ClosedError
from marl_collect.storage.checks import Folder, tensor_parts
from marl_collect.storage.compression import Compression, check_compression
from marl_collect.storage.description import (
    DatasetDescription,
    RunDescription,
    difference,
)
from marl_collect.storage.episodes import EndedEpisode, EpisodeFinder, valid_frames
from marl_collect.storage.files import (
    LOCK,
    FolderLock,
    HeldFolder,
    check_space,
    remove,
    rename_synced,
)
from marl_collect.storage.index import (
    BATCH_NAME,
    EPISODES,
    FILES,
    INDEX,
    BatchEntry,
    Index,
    KeyField,
    StoredFile,
    Totals,
    episodes_to_json,
    files_to_json,
    key_difference,
)
from marl_collect.storage.packed import PACKED_FROM, pack, root_of
from marl_collect.storage.ranges import range_of
from marl_collect.storage.remote import check_local

_INCOMPLETE: Final = ".incomplete"


@final
class Writer(Closing):
    """Writes batches ``[B, T]`` to a new folder or a dataset of the same kind.

    A folder has one writer at a time. Trajectories continue across the batches of one
    writer, so add a collector's batches in their order.

    Example:
        >>> with Writer(path, DatasetDescription("task", description)) as writer:
        ...     for batch in collector:
        ...         writer.add(batch)

    Attributes:
        path: the folder, absolute.
    """

    def __init__(
        self,
        path: str | Path,
        description: DatasetDescription,
        run: RunDescription | None = None,
        *,
        compression: Compression = "lz4",
    ) -> None:
        """Create the folder, or continue after an earlier writer.

        Args:
            path: a folder that is new, empty or holds a dataset.
            description: must equal that of an existing dataset.
            run: describes the batches of this writer.
            compression: of large frames such as images, lossless. ``"zstd"`` makes
                smaller files than ``"lz4"`` and takes more time. With ``"none"`` all
                tensors are raw numbers, which are mapped into memory.

        Raises:
            FileExistsError: if the folder holds something else.
            ValueError: if there is no such compression, or the descriptions differ.
                The message names the first difference.
            BlockingIOError: if another writer has the folder open.
        """
        self._closed = True
        check_compression(compression)
        self._compression = compression
        check_local(path)
        self.path: Final = Path(path).absolute()
        check_target(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._folder = HeldFolder(self.path)
        self._lock = FolderLock(self.path / LOCK)
        try:
            index = self._opened(description)
            self._index = index.with_run(run or RunDescription())
            self._index.save(self.path)
        except BaseException:
            self._lock.close()
            raise
        self._finder = EpisodeFinder()
        self._added = Totals()
        self._failed: _Failed | None = None
        self._closed = False

    def __repr__(self) -> str:
        """Return the path, and whether it is closed."""
        return f"Writer({str(self.path)!r}{', closed' if self._closed else ''})"

    @property
    def contents(self) -> Index:
        """The content of the dataset on disk, including earlier runs."""
        return self._index

    @property
    def added(self) -> Totals:
        """Totals of the batches that this writer has added."""
        return self._added

    def add(self, batch: TensorDictBase) -> list[EndedEpisode]:
        """Write a batch; when this returns, it is on disk.

        After an error the same batch may be added again. If another batch is added
        instead, episodes with frames in the missing batch are incomplete and are never
        listed.

        Returns:
            The episodes that ended in it.

        Raises:
            ValueError: if a key has another shape or dtype than in the dataset, the
                return of an episode is not finite, or an episode continues in another
                row. The message names the key or the episode.
            OSError: if the disk is full, or the folder was moved or replaced.
            ClosedError: after ``close``, and in a fork of the process that opened
                this writer.
        """
        self._check_open()
        keys = _fields(batch)
        self._check_keys(keys)
        if self._failed is not None and not self._failed.is_of(batch):
            self._finder.leave_out(self._failed.trajectories)
        self._failed = None
        try:
            return self._write(batch, keys)
        except BaseException:
            self._failed = _Failed.of(batch)
            raise

    def _write(
        self, batch: TensorDictBase, keys: tuple[KeyField, ...]
    ) -> list[EndedEpisode]:
        nbytes = {k: t.numel() * t.element_size() for k, t in flatten(batch).items()}
        packed = packed_keys(keys, self._compression)
        self._folder.check()
        raw = sum(n for k, n in nbytes.items() if k not in packed)
        complete = len(self._index.batches)
        check_space(self.path, raw, f"{complete} batches are complete, the next has")
        finder = copy.deepcopy(self._finder)
        ended = finder.add(batch)
        _check_returns(ended)
        folder = self.path / self._index.next_batch
        if folder.exists():  # An earlier add failed after the rename.
            self._index.save(self.path)  # It may even be listed.
            remove(folder)
        temporary = self.path / _INCOMPLETE
        remove(temporary)  # An earlier add failed before the rename.
        files = _write_tensors(batch, temporary, packed, self._compression)
        texts = {FILES: files_to_json(files), EPISODES: episodes_to_json(ended)}
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        rename_synced(temporary, folder)
        size, frames = batch.shape[:2]
        entry = BatchEntry(
            folder.name,
            len(self._index.runs) - 1,
            (size, frames),
            sum(valid_frames(batch)),
            len(ended),
            sum(nbytes.values()),
            {name: zlib.crc32(text.encode()) for name, text in texts.items()},
        )
        index = self._index.with_batch(entry, keys, ended)
        added = self._added.plus(entry, ended)
        self._folder.check()  # It may have been moved in the meantime.
        index.save(self.path)
        self._index, self._finder, self._added = index, finder, added
        return ended

    def close(self) -> None:
        """Release the folder; may be called twice.

        A folder without any batch is removed. In a fork of the process that opened this
        writer, nothing happens.
        """
        if not self._closed and self._lock.held and not self._index.batches:
            with contextlib.suppress(OSError):  # The folder holds other files.
                self._folder.check()
                self._remove_unlisted(self._index)
                for name in (INDEX, INDEX + ".new", LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
        self._closed = True
        self._lock.close()

    def _opened(self, description: DatasetDescription) -> Index:
        if not (self.path / INDEX).exists():
            return Index(description)
        index = Index.load(Folder(self.path))
        # JSON turns tuples into lists, and keys of mappings into strings.
        here = json.loads(json.dumps(description.to_json()))
        different = difference(index.description.to_json(), here)
        if different is not None:
            name, there, given = different
            raise ValueError(
                f"{self.path} holds a dataset of another kind: {name} is {there!r} "
                f"there, but {given!r} here. Write to another folder."
            )
        self._remove_unlisted(index)
        return index

    def _remove_unlisted(self, index: Index) -> None:
        """Remove what a killed writer left before listing it."""
        listed = {entry.name for entry in index.batches}
        for folder in self.path.iterdir():
            unlisted = BATCH_NAME.fullmatch(folder.name) and folder.name not in listed
            if unlisted or folder.name == _INCOMPLETE:
                remove(folder)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This writer is closed: open a new one.")
        if not self._lock.held:
            raise ClosedError(
                f"The writer of {self.path} belongs to the process that opened it, and "
                "this process is a fork of that one. Write in the original process, or "
                "open a writer for another folder."
            )

    def _check_keys(self, keys: tuple[KeyField, ...]) -> None:
        if not self._index.keys:
            return
        different = key_difference(self._index.keys, keys)
        if different is not None:
            key, expected, found = different
            raise ValueError(
                f"The batch does not fit the dataset {self.path}: {key} is {found}, "
                f"but in the dataset {expected}. Write to another folder."
            )


@final
@dataclass(frozen=True)
class _Failed:
    """Identifies a batch that could not be added."""

    digest: bytes
    trajectories: frozenset[int]

    @classmethod
    def of(cls, batch: TensorDictBase) -> Self:
        ids = flatten(batch).get(TRAJ_IDS)
        found = [] if ids is None else ids.unique().tolist()
        return cls(digest_of(batch), frozenset(found))

    def is_of(self, batch: TensorDictBase) -> bool:
        return digest_of(batch) == self.digest


def digest_of(batch: TensorDictBase) -> bytes:
    """Return a digest of a batch, which is equal if the batch is added again."""
    digest = hashlib.blake2b(digest_size=16)
    for key, tensor in sorted(flatten(batch).items()):
        digest.update(repr((key, tensor.shape, tensor.dtype)).encode())
        raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy())
    return digest.digest()


def check_target(path: Path) -> None:
    """Check that a dataset may be written to ``path``, without changing anything.

    Raises:
        FileExistsError: if something else is there.
        ValueError: if it is a URL.
    """
    check_local(path)
    if path.is_file():
        raise FileExistsError(f"{path} is a file: a dataset is written to a folder.")
    if not path.is_dir() or (path / INDEX).exists():
        return
    others = [entry.name for entry in path.iterdir()]
    # A writer that was killed early can leave these files.
    if not set(others) <= {LOCK, INDEX + ".new"}:
        raise FileExistsError(
            f"{path} holds {min(others)!r} but no {INDEX}, so it is not a dataset. "
            "Write to a new or empty folder."
        )


def packed_keys(keys: Sequence[KeyField], compression: str) -> set[Key]:
    """Return the keys whose frames are large enough to be packed."""
    if compression == "none":
        return set()
    return {field.key for field in keys if field.nbytes >= PACKED_FROM}


def _write_tensors(
    batch: TensorDictBase, folder: Path, packed: set[Key], compression: str
) -> dict[Key, StoredFile]:
    tensors, frames = flatten(batch), valid_frames(batch)
    try:
        batch.exclude(*packed).memmap(str(folder), copy_existing=True)
    except RuntimeError as error:  # torch raises this for system errors.
        raise OSError(
            f"The batch could not be written to {folder}: {error}. Check the limits "
            "of the disk and of this process (ulimit -f)."
        ) from error
    files: dict[Key, StoredFile] = {}
    for key, tensor in tensors.items():
        if key not in packed:
            raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(raw.numpy())
            found = range_of(tensor, frames)
            files[key] = StoredFile(None, raw.numel(), checksum, found)
            continue
        root = tensors[key[1:]] if root_of(key, packed) != key else None
        if root is not None and (root.shape, root.dtype) != (
            tensor.shape,
            tensor.dtype,
        ):
            root = None
        temporary = folder / ".packed"
        codec, nbytes, checksum = pack(temporary, tensor, compression, root)
        path = folder.joinpath(*tensor_parts(key, codec))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(path)
        files[key] = StoredFile(codec, nbytes, checksum, range_of(tensor, frames))
    return files


def _fields(batch: TensorDictBase) -> tuple[KeyField, ...]:
    return tuple(
        KeyField(key, tuple(t.shape[2:]), str(t.dtype).removeprefix("torch."))
        for key, t in sorted(flatten(batch).items())
    )


def _check_returns(ended: Sequence[EndedEpisode]) -> None:
    for episode in ended:
        for name, returns in episode.returns.items():
            for agent, value in enumerate(returns):
                if not math.isfinite(value):
                    raise ValueError(
                        f"Agent {agent} of the group {name!r} has the return {value} "
                        f"in the episode that ends in row {episode.environment}, frame "
                        f"{episode.frame} of the batch. Returns must be finite, so the "
                        "batch was not written. Look for a reward that is NaN or "
                        "infinite."
                    )
