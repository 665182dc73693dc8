"""The documentation's table of differences names tests of this folder, each once."""

import ast
from collections import Counter
from pathlib import Path

from differences import BELOW, DIFFERENCES, PAGE, RAISES


def test_every_row_names_a_test_of_both_libraries_that_no_other_names() -> None:
    test_names: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test_names.add(node.name)
    counts = Counter(row.test for row in DIFFERENCES)
    assert {test.partition("[")[0] for test in counts} <= test_names
    assert max(counts.values()) == 1
    assert RAISES.keys() | BELOW.keys() <= counts.keys()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(DIFFERENCES) == len(rows) - 1  # The head.
