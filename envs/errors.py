"""Errors that the task providers of all environment families raise."""


class UnknownTaskError(ValueError):
    """No installed task has this name. The message says where to find it, if known."""


class MissingPackageError(ImportError):
    """A task needs a package that is not installed. The message names the package."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "marl-collect[{extra}]"'
