"""Errors that the task providers of all environment families raise."""

from collections.abc import Iterator
from contextlib import contextmanager


class UnknownTaskError(ValueError):
    """No installed task has this name. The message says where to find it, if known."""


class MissingPackageError(ImportError):
    """A task needs a package that is not installed. The message names the package."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "marl-collect[{extra}]"'


@contextmanager
def imports_of(extra: str) -> Iterator[None]:
    """Explain an import in the block that fails.

    Raises:
        MissingPackageError: for an ImportError; names the extra to install.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"This environment needs the extra {extra}, but {error.name or 'a module'} "
            f"cannot be imported ({error}). Install it with: {install_command(extra)}",
            name=error.name,
        ) from error
