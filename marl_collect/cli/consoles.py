"""The consoles, and how commands report errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

USER_ERROR = 2
FAILED = 1

out = Console(emoji=False, markup=False, highlight=False)
"""Standard output: results."""

err = Console(stderr=True, emoji=False, markup=False, highlight=False)
"""Standard error: progress and errors."""


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Print errors of these kinds without a traceback and exit: messages suffice."""
    try:
        yield
    except kinds as error:
        # str() of a KeyError is the repr of its message.
        text = error.args[0] if isinstance(error, KeyError) else error
        raise fail(str(text), USER_ERROR) from error


def fail(message: str, code: int = FAILED) -> typer.Exit:
    """Print ``message`` and return the exception that ends the command."""
    text = Text.assemble(("error:", "bold red"), f" {message}")
    err.print(text, soft_wrap=True)
    return typer.Exit(code)
