"""Errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DatasetError(ValueError):
    """A file of a dataset is damaged, missing, or contradicts another one."""


@contextmanager
def naming(path: str | Path, what: str = "a file of a dataset") -> Iterator[None]:
    """Name the file in any error raised inside; an ``OSError`` already names it."""
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # Building a space can raise anything.
        raise DatasetError(f"{path} is not {what}: {error!r}.") from error
