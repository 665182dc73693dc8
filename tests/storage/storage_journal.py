"""Changes the files of a dataset, with checksums corrected so that content is checked.

Nothing here is part of the package: tests forge datasets with it.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marl_collect.storage.checks import Folder
from marl_collect.storage.frames import segment_name
from marl_collect.storage.index import JOURNAL, BatchEntry, Index, journal_line

Entries = list[dict[str, Any]]


def entries(folder: Path) -> Entries:
    """Return the entries of a journal, without checking them."""
    lines = (folder / JOURNAL).read_bytes().split(b"\n")[:-1]
    return [json.loads(line[9:]) for line in lines]


def write_entries(folder: Path, content: Entries) -> None:
    """Replace a journal; its checksums are right."""
    checksum, lines = 0, []
    for entry in content:
        line, checksum = journal_line(entry, checksum)
        lines.append(line)
    (folder / JOURNAL).write_bytes(b"".join(lines))


def edit(folder: Path, change: Callable[[Entries], Any]) -> None:
    """Change the entries of a journal in place."""
    content = entries(folder)
    change(content)
    write_entries(folder, content)


def only(kind: str, content: Entries) -> list[Any]:
    """Return the data of all entries of a kind."""
    return [entry[kind] for entry in content if kind in entry]


def extent(folder: Path, batch: int) -> tuple[Path, BatchEntry]:
    """Return the data file of a batch, and its entry with the positions in it."""
    entry = Index.load(Folder(folder)).batches[batch]
    return folder / segment_name(entry.segment), entry


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))


def forge(folder: Path, batch: int, position: int, content: bytes) -> None:
    """Write bytes into a batch, and correct its checksum in the journal."""
    path, parts = extent(folder, batch)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)
        file.seek(parts.offset)
        checksum = zlib.crc32(file.read(parts.packed_at - parts.offset))
    edit(folder, lambda e: only("batch", e)[batch].update(checksum=checksum))


def notes(folder: Path, batch: int) -> bytes:
    """Return the notes of a batch: the table of its episodes, and the ranges."""
    path, parts = extent(folder, batch)
    return zlib.decompress(path.read_bytes()[parts.notes_at : parts.packed_at])


def forge_notes(folder: Path, batch: int, text: bytes) -> None:
    """Replace the notes of a batch, and move what follows."""
    path, parts = extent(folder, batch)
    content, compressed = path.read_bytes(), zlib.compress(text)
    head = content[parts.offset : parts.notes_at] + compressed
    path.write_bytes(content[: parts.offset] + head + content[parts.packed_at :])
    shift = len(compressed) - (parts.packed_at - parts.notes_at)

    def change(found: Entries) -> None:
        for number, entry in enumerate(only("batch", found)):
            if number == batch:
                entry.update(notes=len(compressed), checksum=zlib.crc32(head))
            elif entry["segment"] == int(path.name[-6:]) and number > batch:
                entry["offset"] += shift

    edit(folder, change)
