"""Mean and standard deviation of keys, kept in a file of the dataset."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from marl_collect.core.description import Key
from marl_collect.files.atomic import write_atomically
from marl_collect.storage.checks import DatasetError, Folder, key_of, naming, numbers
from marl_collect.storage.index import Index
from marl_collect.storage.parquet.moments import Moments
from marl_collect.storage.remote import RemoteFolder

MOMENTS: Final = "moments.json"


def load_moments(folder: Folder, index: Index) -> dict[Key, Moments]:
    """Return the moments of all frames that are kept in a folder, as float32.

    They are only a copy of what can be computed: a file that is missing, damaged, or of
    another state of the journal counts as empty.
    """
    try:
        content = folder.read(MOMENTS)
        with naming(folder.named(MOMENTS), "a file of moments"):
            return _parse(content, index)
    except (DatasetError, OSError):
        return {}


def _parse(content: bytes, index: Index) -> dict[Key, Moments]:
    import torch

    data = json.loads(content)
    if data["journal"] != [index.size, index.checksum]:
        return {}
    groups = index.description.environment.groups
    shapes = {
        item.key: item.shape[1:] if item.key[0] in groups else item.shape
        for item in index.keys
    }
    moments = {}
    for item in data["moments"]:
        key = key_of(item["key"])
        lists = (numbers(item[name]) for name in ("mean", "std"))
        tensors = (
            torch.tensor(values, dtype=torch.float32, device="cpu") for values in lists
        )
        moments[key] = Moments(*(tensor.view(shapes[key]) for tensor in tensors))
        if not _plausible(moments[key]):
            raise DatasetError(f"the moments of {key!r} are impossible.")
    return moments


def save_moments(folder: Folder, index: Index, moments: Mapping[Key, Moments]) -> None:
    """Replace the moments in a folder, except in an object store.

    NaN and infinity are left out. Failing to write is not an error. Processes that
    train together may do so at once: the last one wins.
    """
    if isinstance(folder, RemoteFolder):
        return
    items = [
        {"key": key} | {name: t.flatten().tolist() for name, t in vars(m).items()}
        for key, m in moments.items()
        if _plausible(m)
    ]
    # The journal has checksums of all frames.
    journal = [index.size, index.checksum]
    content = json.dumps({"journal": journal, "moments": items})
    with suppress(OSError):  # The folder may be read-only, or the disk full.
        write_atomically(folder.path / MOMENTS, content)


def _plausible(moments: Moments) -> bool:
    """Whether values without NaN and infinity can have these moments."""
    finite = moments.mean.isfinite().all() and moments.std.isfinite().all()
    return bool(finite and (moments.std >= 0).all())
