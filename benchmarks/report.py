"""Writes the report of a run next to its JSON: Markdown and pictures.

python benchmarks/report.py runs/benchmarks.json
python benchmarks/report.py RESULT.json --readme README.md   # only the README's table
python benchmarks/report.py RESULT.json --chart PICTURE      # only the README's chart
"""

import argparse
from pathlib import Path

from harness.results import load
from reporting.chart import draw
from reporting.page import write_page
from reporting.reading import Reading
from reporting.readme import with_table


def main() -> None:
    """Write what was asked for, and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--readme", type=Path, help="document with the table's marks")
    parser.add_argument("--chart", type=Path, help="picture to write")
    arguments = parser.parse_args()
    results = load(arguments.result)
    if arguments.readme is not None:
        text = arguments.readme.read_text(encoding="utf-8")
        arguments.readme.write_text(with_table(text, results), encoding="utf-8")
    if arguments.chart is not None:
        figure = draw(Reading(results))
        figure.savefig(arguments.chart, dpi=130, metadata={"Software": None})
    if arguments.readme is None and arguments.chart is None:
        print(write_page(results, arguments.result))


if __name__ == "__main__":
    main()
