"""Draw the chart of collection speed that the README and the documentation show.

python benchmarks/chart.py benchmarks/results/committed.json docs/pictures/speed.png
"""

import argparse
from pathlib import Path

from harness.results import load
from reporting.chart import draw
from reporting.reading import Reading


def main() -> None:
    """Write the chart of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(Reading(load(arguments.result)))
    figure.savefig(arguments.picture, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
