"""Text from files that is shown: no character of it controls a terminal or a table."""

from collections.abc import Iterable


def printable(text: str) -> str:
    """Return a text with characters that are not printable escaped, as ``repr`` does.

    They are control characters such as ESC, which begins commands to terminals,
    characters that reverse the direction of text, and halves of characters. New lines
    and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in text
    )


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table, in which no cell begins another one."""
    escaped = (c.replace("|", "\\|").replace("\n", "<br>") for c in cells)
    return f"| {' | '.join(escaped)} |"
