"""Text from files is shown without characters that control a terminal."""

import sys
import unicodedata

import pytest

from marl_collect.programs.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0gLXJmIH4=\x07", r"\x1b]52;c;cm0gLXJmIH4=\x07"),
        ("\x1b]0;title\x1b\\", r"\x1b]0;title\x1b" + "\\"),
        ("\x9d52;c;eA==\x9c", r"\x9d52;c;eA==\x9c"),
        ("\x9b2J\x85\x7f\x08\r\x0b\x0c\x00", r"\x9b2J\x85\x7f\x08\r\x0b\x0c\x00"),
        ("a\u202egpj.exe\u2066b\u2069\u200f", r"a\u202egpj.exe\u2066b\u2069\u200f"),
        ("\u2028\u2029\ud800\U000e0041", r"\u2028\u2029\ud800\U000e0041"),
        ("two\nlines\tof äöü 日本 █▏…", "two\nlines\tof äöü 日本 █▏…"),
    ],
)
def test_characters_that_are_not_printable_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_control_or_format_character_is_left() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))))
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    assert left == {"\n", "\t"}
    assert not {"\u2028", "\u2029"} & set(shown)
