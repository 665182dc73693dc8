"""Trains examples with three seeds each, and draws the curves of the documentation.

    python benchmarks/examples.py run                  # all studies, in runs/examples
    python benchmarks/examples.py run self_play_connect_four
    python benchmarks/examples.py page                 # pictures and the table

``page`` packs the curves of all seeds of a study into one file,
``benchmarks/results/examples/NAME.json``, which is committed, draws
``docs/pictures/NAME.png`` from it and writes the table of ``docs/examples.md``.
A seed whose curve exists there, from the same command, or in the folder of runs, is not
trained again.
"""

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "examples"
COMMITTED = ROOT / "benchmarks" / "results" / "examples"
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "examples.md"
BEGIN, END = "<!-- curves -->\n", "<!-- end of curves -->\n"
SEEDS = 3


@dataclass(frozen=True)
class Study:
    """Runs of one example.

    Attributes:
        command: the script and its arguments.
        columns: columns of its curve, with their labels; the first one is trained for.
        ylabel: what the columns are.
        scale: factor of the values that are shown.
        seeds: number of seeds.
        earlier: a column with a value for each earlier version of the policy, in the
            rows of the frames that this version was trained with.
    """

    command: str
    columns: dict[str, str]
    ylabel: str
    scale: float = 1.0
    seeds: int = SEEDS
    earlier: str | None = None


Curve = dict[str, list[float]]
RANDOM = "random"
"""A column with the result of random actions."""

VISITOR = {"visitor": "trained", "random": "random actions"}
STUDIES = {
    "mappo_meltingpot": Study(
        "mappo_meltingpot.py --substrate coins --workers 1 --envs 16 --frames 60800",
        VISITOR,
        "return of a visitor in coins",
        seeds=8,
    ),
    "mappo_meltingpot_bfloat16": Study(
        "mappo_meltingpot.py --substrate coins --workers 1 --envs 16 --frames 60800 "
        "--conv-dtype bfloat16",
        VISITOR,
        "return of a visitor in coins, bfloat16",
    ),
    "mappo_meltingpot_commons": Study(
        "mappo_meltingpot.py --substrate commons_harvest__open --workers 1 --envs 8 "
        "--batch 800 --minibatch 4 --limit 200 --frames 16000 --every 5 --games 8",
        VISITOR,
        "return of a visitor in commons harvest",
        seeds=4,
    ),
    "self_play_connect_four": Study(
        "self_play_connect_four.py --workers 1",
        {
            "random": "against random actions",
            "version": "last version against the version at these frames",
        },
        "games won in connect four, %",
        scale=100,
        earlier="version",
    ),
    "qmix_simple_spread": Study(
        "qmix_simple_spread.py --workers 1", {"return_team": "QMIX"}, "return of team"
    ),
    "maddpg_simple_tag": Study(
        "maddpg_simple_tag.py --workers 1",
        {
            "adversary": "adversaries",
            "random_adversary": "random adversaries",
            "agent": "agent",
            "random_agent": "random agent",
        },
        "return against random actions",
    ),
    "ppo_multiwalker": Study(
        "ddp_ppo.py --workers 1 --frames 200000",
        {"return_per_agent": "IPPO", "random": "random actions"},
        "return per walker in training",
    ),
    "mappo_multiwalker": Study(
        "ddp_ppo.py --critic central --workers 1 --frames 200000",
        {"return_per_agent": "MAPPO", "random": "random actions"},
        "return per walker in training",
    ),
    "population_matrix_game": Study(
        "population_matrix_game.py --workers 1 --frames 440000",
        {f"m{member}": f"member {member}" for member in range(3)}
        | {"random": "random actions"},
        "reward per 1,000 frames",
        scale=1_000,
    ),
    "benchmarl_mappo": Study(
        "benchmarl_mappo.py --iterations 40",
        {"return": "BenchMARL's MAPPO"},
        "return per agent in training",
    ),
}


def train(names: list[str]) -> None:
    """Run the seeds of studies that have no curve yet."""
    for name in names:
        committed = packed(name)
        for seed in range(STUDIES[name].seeds):
            folder = RUNS / name / f"seed_{seed}"
            if folder.name in committed or (folder / "seconds.json").exists():
                continue
            script, *arguments = STUDIES[name].command.split()
            command = [sys.executable, str(ROOT / "examples" / script), *arguments]
            command += ["--seed", str(seed), "--out", str(folder)]
            print(f"{name}, seed {seed}", flush=True)
            begin = time.monotonic()
            subprocess.run(command, check=True)
            seconds = round(time.monotonic() - begin)
            (folder / "seconds.json").write_text(json.dumps(seconds))


def packed(name: str) -> dict[str, Any]:
    """Return the committed seeds of a study, if its command is still the same."""
    path = COMMITTED / f"{name}.json"
    if not path.exists():
        return {}
    packed_runs = json.loads(path.read_text("utf-8"))
    seeds: dict[str, Any] = packed_runs["seeds"]
    return seeds if packed_runs["command"] == STUDIES[name].command else {}


def pack(name: str) -> None:
    """Write the curves of a finished study into the file that is committed."""
    seeds = packed(name)
    for folder in sorted((RUNS / name).glob("seed_*")):
        if (folder / "seconds.json").exists():
            with (folder / "progress.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            columns = {key: [float(row[key]) for row in rows] for key in rows[0]}
            seconds = json.loads((folder / "seconds.json").read_text())
            seeds[folder.name] = {"seconds": seconds, "curve": columns}
    if len(seeds) >= STUDIES[name].seeds:
        packed_runs = {"command": STUDIES[name].command, "seeds": seeds}
        COMMITTED.mkdir(parents=True, exist_ok=True)
        (COMMITTED / f"{name}.json").write_text(
            json.dumps(packed_runs, indent=1) + "\n", "utf-8"
        )


def draw(name: str, packed_runs: dict[str, Any]) -> None:
    """Draw the seeds of a study, thin, and their mean."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    study = STUDIES[name]
    curves = [seed["curve"] for seed in packed_runs["seeds"].values()]
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for number, (column, label) in enumerate(study.columns.items()):
        colour = f"C{number}"
        scaled_curves = [[study.scale * v for v in curve[column]] for curve in curves]
        for values in scaled_curves:
            axes.plot(curves[0]["frames"], values, color=colour, alpha=0.35, lw=1)
        means = [statistics.mean(values) for values in zip(*scaled_curves, strict=True)]
        axes.plot(curves[0]["frames"], means, color=colour, lw=2, label=label)
    axes.set_xlabel("frames")
    axes.set_ylabel(study.ylabel)
    count = len(curves)
    title = "one seed" if count == 1 else f"{count} seeds and their mean"
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    # Below the axes, where it covers no curve.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURES / f"{name}.png", dpi=100, bbox_inches="tight")
    plt.close(figure)


def row(name: str, packed_runs: dict[str, Any]) -> str:
    """Return a study's row of the table: its last evaluation, over the seeds."""
    study = STUDIES[name]
    seeds = [seed["curve"] for seed in packed_runs["seeds"].values()]
    cells = []
    for column, label in study.columns.items():
        if column == study.earlier:
            versions = [
                f"{int(n_frames):,} {over_seeds(study, seeds, column, index)}"
                for index, n_frames in enumerate(seeds[0]["frames"][:-1])
            ]
            cells.append(f"{label}: {'; '.join(versions)}")
        else:
            cells.append(f"{label} {over_seeds(study, seeds, column, -1)}")
    main_column, *baselines = study.columns
    if RANDOM in baselines and len(seeds) > 1:
        cells.append(distance(seeds, main_column))
    frames = int(seeds[0]["frames"][-1])
    minutes = statistics.mean(s["seconds"] for s in packed_runs["seeds"].values()) / 60
    return (
        f"| `{packed_runs['command']}` | {len(seeds)} | {frames:,} | {minutes:.0f} | "
        f"{study.ylabel}: {', '.join(cells)} |"
    )


def over_seeds(study: Study, seeds: list[Curve], column: str, index: int) -> str:
    """Return a value's mean over the seeds, its standard error, and each seed's."""
    values = [study.scale * seed[column][index] for seed in seeds]
    text = f"{statistics.mean(values):.1f}"
    if len(set(values)) == 1:
        return text
    values_text = ", ".join(f"{value:.1f}" for value in values)
    return f"{text} ± {standard_error(values):.1f} ({values_text})"


def distance(seeds: list[Curve], column: str) -> str:
    """Say how far a column is above random actions, in standard errors.

    Over the seeds, and for each seed over its own episodes if the curve has these
    errors.
    """
    trained_returns = [seed[column][-1] for seed in seeds]
    random = [seed[RANDOM][-1] for seed in seeds]
    gain = statistics.mean(trained_returns) - statistics.mean(random)
    error = math.hypot(standard_error(trained_returns), standard_error(random))
    text = f"{gain / error:.1f} standard errors above random actions"
    if "error" not in seeds[0]:
        return text
    gains = [
        (mean - low) / math.hypot(seed["error"][-1], seed["error_of_random"][-1])
        for mean, low, seed in zip(trained_returns, random, seeds, strict=True)
    ]
    return f"{text} (per seed, over its episodes: {min(gains):.1f} to {max(gains):.1f})"


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def write_page() -> None:
    """Write pictures and table of all studies that were run here or committed."""
    rows, pictures = [], []
    for name in STUDIES:
        pack(name)
        if not (COMMITTED / f"{name}.json").exists():
            continue
        packed_runs = json.loads((COMMITTED / f"{name}.json").read_text("utf-8"))
        draw(name, packed_runs)
        rows.append(row(name, packed_runs))
        pictures.append(f"![Curves of {name}](pictures/{name}.png)")
    text = PAGE.read_text("utf-8")
    before, remainder = text.split(BEGIN)
    after = remainder.split(END)[1]
    table = "\n".join(
        [
            "| command | seeds | frames | minutes | last evaluation |",
            "| --- | ---: | ---: | ---: | --- |",
            *rows,
        ]
    )
    new = f"{before}{BEGIN}{table}\n\n" + "\n".join(pictures) + f"\n{END}{after}"
    PAGE.write_text(new, "utf-8")
    print(table)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY")
    arguments = parser.parse_args()
    if arguments.what == "run":
        train(arguments.studies or list(STUDIES))
    else:
        write_page()


if __name__ == "__main__":
    main()
