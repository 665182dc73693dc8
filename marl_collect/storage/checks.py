"""Errors that name the file, and checks of what files say."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from marl_collect.core.description import Key

DEEPEST: Final = 100
"""Parts of the longest key; TensorDicts are nested by recursion."""


class DatasetError(ValueError):
    """A file of a dataset is damaged, missing, or contradicts another one."""


@contextmanager
def naming(path: str | Path, what: str) -> Iterator[None]:
    """Name the file in any error raised inside; an ``OSError`` already names it.

    Args:
        path: the file whose content is parsed inside.
        what: the expected content, such as ``"a file of a dataset"``.
    """
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # Building a space can raise anything.
        raise DatasetError(f"{path} is not {what}: {error!r}.") from error


def key_of(data: Any) -> Key:
    """Check a key."""
    is_list = isinstance(data, list) and 0 < len(data) <= DEEPEST
    if not is_list or not all(isinstance(part, str) for part in data):
        raise DatasetError(
            f"{data!r} is not a key: a key is a list of 1 to {DEEPEST} strings."
        )
    return tuple(data)


def integer(data: Mapping[str, Any], name: str, below: int | None = None) -> int:
    """Return an entry that must be a non-negative integer."""
    value = data[name]
    _check_size(name, value)
    if below is not None and value >= below:
        raise DatasetError(f"{name} is {value}, but must be less than {below}.")
    return int(value)


def shape_of(data: Any) -> tuple[int, ...]:
    """Return a shape: a list of non-negative integers."""
    if not isinstance(data, list):
        raise DatasetError(f"{data!r} is not a shape.")
    for size in data:
        _check_size("a size", size)
    return tuple(data)


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise DatasetError(
            f"{name} is {value!r}, but must be an integer of at least 0."
        )
