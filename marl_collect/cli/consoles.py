"""The consoles, and how commands report errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typing_extensions import override

from marl_collect.programs.printable import printable

USER_ERROR = 2
FAILED = 1


@final
class SafeConsole(Console):
    """Shows all text literally: none of it is markup, or controls the terminal.

    Files that somebody else wrote have text for it, in names, errors and metadata.
    """

    def __init__(self, **options: Any) -> None:
        """Take options of ``Console``."""
        super().__init__(emoji=False, markup=False, highlight=False, **options)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string, also of one in a table."""
        return super().render_str(printable(text), **options)

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of anything that is shown."""
        if isinstance(renderable, Text):
            text = printable(renderable.plain)
            if text != renderable.plain:
                renderable = renderable.blank_copy(text)
        return super().render(renderable, options)


out = SafeConsole()
"""Standard output: results."""

err = SafeConsole(stderr=True)
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
    text = Text.assemble(("error:", "bold red"), f" {printable(message)}")
    err.print(text, soft_wrap=True)
    return typer.Exit(code)
