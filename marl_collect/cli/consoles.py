"""Where text goes, and how a command fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

USER_ERROR = 2
FAILED = 1

out = Console()
"""What was asked for."""

err = Console(stderr=True)
"""What happens meanwhile, and what went wrong."""


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Show errors of these kinds without a traceback: the message says what to do."""
    try:
        yield
    except kinds as error:
        # The text of a KeyError is the repr of its message.
        text = error.args[0] if isinstance(error, KeyError) else error
        raise fail(str(text), USER_ERROR) from error


def fail(message: str, code: int = FAILED) -> typer.Exit:
    """Show ``message``, and return what to raise."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    return typer.Exit(code)
