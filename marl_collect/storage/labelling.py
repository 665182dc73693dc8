"""``label``: says who made a dataset, and what it is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marl_collect.storage.appending import DatasetFiles
from marl_collect.storage.checks import Folder
from marl_collect.storage.description import Metadata
from marl_collect.storage.files import LOCK, FolderLock
from marl_collect.storage.index import Index
from marl_collect.storage.remote import check_local


def label(
    path: str | Path,
    *,
    author: str | None = None,
    license: str | None = None,  # noqa: A002 - the field's word
    description: str | None = None,
    tags: Sequence[str] | None = None,
) -> Metadata:
    """Change the metadata of a dataset; exports and cards have them.

    Args:
        path: the folder of a dataset.
        author: who made it; None, here and below, leaves what there is.
        license: such as ``"CC-BY-4.0"``.
        description: text.
        tags: words to find it by.

    Returns:
        All metadata of the dataset.

    Raises:
        FileNotFoundError: if the folder holds no dataset.
        TypeError: if a value is no text.
        BlockingIOError: if a writer has the dataset open.
    """
    check_local(path)
    folder = Path(path).absolute()
    about = Index.load(Folder(folder)).description
    values: dict[str, Any] = {
        "author": author,
        "license": license,
        "description": description,
        "tags": None if tags is None else tuple(tags),
    }
    changes = {name: value for name, value in values.items() if value is not None}
    with FolderLock(folder / LOCK):
        files = DatasetFiles.opened(folder, about)
        try:
            metadata = replace(files.index.metadata, **changes)
            metadata = Metadata.from_json(metadata.to_json())  # Checks the types.
            files.note({"metadata": metadata.to_json()})
        finally:
            files.close()
    return metadata
