"""Folders that reach the disk completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from marl_collect.files.atomic import sync, sync_folder
from marl_collect.files.locks import LOCK, FolderLock
from marl_collect.files.urls import local_folder


def remove(path: Path) -> None:
    """Remove a folder, a file or a link; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder in ``folder`` is on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name), os.O_RDWR)
        sync_folder(Path(parent))


def rename_synced(temporary: Path, final: Path) -> None:
    """Rename a file or folder after all of its content has reached the disk."""
    if temporary.is_dir():
        sync_tree(temporary)
    else:
        sync(temporary, os.O_RDWR)
    temporary.rename(final)
    sync_folder(final.parent)


@contextmanager
def completed(target: Path, what: str, *, or_empty: bool = False) -> Iterator[Path]:
    """Yield a path for a new file or folder, which is renamed to ``target`` at the end.

    The path is in a hidden folder ``.NAME.incomplete`` beside the target. An error
    removes it. If the process is killed it stays, and is removed here by the next call
    for the same target.

    Args:
        target: the file or folder to write.
        what: verb for the error, such as "export".
        or_empty: whether an empty folder may be at the target.

    Raises:
        ValueError: if the target is a URL.
        FileExistsError: if something is at the target.
        BlockingIOError: if another process writes to the same target.
    """
    target = local_folder(target)
    _check_free(target, what, or_empty=or_empty)
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.with_name(f".{target.name}.incomplete")
        if hidden.is_symlink():
            hidden.unlink()  # What it points to stays.
        hidden.mkdir(exist_ok=True)
        with FolderLock(hidden / LOCK):
            try:
                # Another process may have written it until the lock was free.
                _check_free(target, what, or_empty=or_empty)
                for leftover in hidden.iterdir():
                    if leftover.name != LOCK:
                        remove(leftover)
                yield hidden / target.name
                rename_synced(hidden / target.name, target)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    except BaseException:
        for parent in created:
            with suppress(OSError):  # It was not created, or is in use.
                parent.rmdir()
        raise


def _check_free(target: Path, what: str, *, or_empty: bool) -> None:
    if or_empty and target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        free = "a new or empty folder" if or_empty else "a path that does not exist"
        raise FileExistsError(f"{target} exists: {what} to {free}.")
