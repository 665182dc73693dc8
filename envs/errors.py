"""Errors about task names, shared by the providers of all environment families."""


class UnknownTaskError(ValueError):
    """No task of this name is installed; the message says where it may be."""


class MissingPackageError(ImportError):
    """A task needs a package that is not installed; the message names it."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "marl-collect[{extra}]"'
