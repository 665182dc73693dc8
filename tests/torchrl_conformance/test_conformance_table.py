"""The table of differences is complete, current and documented."""

import ast
from collections import Counter
from pathlib import Path

from differences import DIFFERENCES, table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "torchrl_conformance.md"


def test_every_line_names_a_test_of_both_libraries() -> None:
    test_names: set[str] = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test_names.add(node.name)
    assert {line.test.partition("[")[0] for line in DIFFERENCES} <= test_names


def test_no_test_has_two_lines() -> None:
    counts = Counter(line.test for line in DIFFERENCES)
    assert max(counts.values()) == 1


def test_the_documentation_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
