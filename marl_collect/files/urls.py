"""URLs of object stores, where paths of folders are expected."""

import re
from pathlib import Path
from typing import Final

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)")


def url_of(path: str | Path) -> str | None:
    """Return a URL with single slashes in its path; None if ``path`` is a folder here.

    A ``Path`` has removed one of the two slashes, and object stores tell ``a//b`` from
    ``a/b``.

    Raises:
        ValueError: if it is the URL of a folder of this machine, or has no path.
    """
    match = _URL.fullmatch(str(path))
    if match is None:
        return None
    if match[1] in ("file", "local"):
        raise ValueError(
            f"{path} is a folder of this machine: pass its path, without {match[1]}:."
        )
    place = "/".join(part for part in match[2].split("/") if part)
    if not place:
        raise ValueError(
            f"{path} names no place in a store, as {match[1]}://bucket/data does."
        )
    return f"{match[1]}://{place}"


def local_folder(path: str | Path) -> Path:
    """Return the absolute path of a folder to write to.

    Raises:
        ValueError: if ``path`` is a URL.
    """
    url = url_of(path)
    if url is not None:
        raise ValueError(
            f"{url} is a URL, but batches are written to folders of this machine. "
            f"Write to a folder: `marl-collect copy FOLDER {url}` copies a dataset, "
            "and later the files that were added."
        )
    return Path(path).absolute()
