"""Writes the README's table and chart from the JSON of a run.

python benchmarks/report.py RESULT.json --readme README.md
python benchmarks/report.py RESULT.json --chart PICTURE
"""

import argparse
from pathlib import Path

from harness.results import load
from reporting.chart import draw
from reporting.reading import Reading
from reporting.readme import with_table


def main() -> None:
    """Write what was asked for."""
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
        parser.error("pass --readme, --chart or both")


if __name__ == "__main__":
    main()
