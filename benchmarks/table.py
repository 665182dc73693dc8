"""Prints the README's table for a run, or writes it into the README.

python benchmarks/table.py benchmarks/results/committed.json
python benchmarks/table.py benchmarks/results/committed.json --write README.md
"""

import argparse
from pathlib import Path

from harness.results import load
from reporting.readme import BEGIN, END, between_marks, readme_table


def main() -> None:
    """Print the table, or write it into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--write", type=Path, help="document with the table's marks")
    arguments = parser.parse_args()
    table = readme_table(load(arguments.result))
    if arguments.write is None:
        print(table)
        return
    text = arguments.write.read_text(encoding="utf-8")
    between_marks(text)
    head, remainder = text.split(BEGIN)
    tail = remainder.split(END, 1)[1]
    new = f"{head}{BEGIN}\n{table}\n{END}{tail}"
    arguments.write.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
