"""Writes the report of a run next to its JSON: Markdown and pictures.

python benchmarks/report.py runs/benchmarks.json
"""

import argparse
from pathlib import Path

from harness.results import load
from reporting.page import write_page


def main() -> None:
    """Write the report and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    print(write_page(load(arguments.result), arguments.result))


if __name__ == "__main__":
    main()
