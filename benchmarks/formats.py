"""Sizes and times of exports and imports of short episodes, which cost most.

The figures in docs/storage.md come from::

    python benchmarks/formats.py --episodes 2000

Formats whose packages are missing are omitted.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from marl_collect import record
from marl_collect.storage import export_dataset, import_dataset
from marl_collect.storage.files import size_of
from marl_collect.storage.formats.registry import find_format
from marl_collect.storage.formats.table import FORMATS
from marl_collect.testing.counting import CountingEnv, CountingOptions


def make_env() -> CountingEnv:
    """Return an environment of five agents with episodes of three to nine frames."""
    return CountingEnv(CountingOptions(min_length=3, max_length=9))


def size(path: Path) -> float:
    """Return the size of a file or folder in MB."""
    return (path.stat().st_size if path.is_file() else size_of(path)) / 1e6


def floor_of_minari(file: Path, episodes: int) -> float:
    """Return the size in MB of Minari's groups of each episode, without any data."""
    import h5py

    with h5py.File(file, "w", track_order=True, libver="latest") as data:
        for number in range(episodes):
            episode = data.create_group(f"episode_{number}")
            episode.attrs["id"], episode.attrs["total_steps"] = number, 0
            for name in ("observations", "actions", "infos"):
                for group in ("hunter", "prey"):
                    episode.create_group(f"{name}/{group}")
    return size(file)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "store")
        dataset = record(folder / "d", make_env, episodes=options.episodes, seed=0)
        frames = dataset.contents.totals.frames
        print(f"{options.episodes:,} episodes, {frames:,} frames\n")
        print("| format | MB | export, s | import, s |\n|---|---|---|---|")
        print(f"| the dataset | {size(folder / 'd'):.2f} | | |")
        for format_name in FORMATS:
            try:
                if find_format(format_name).export is None:
                    continue
            except ImportError:
                continue
            minari = format_name == "minari"
            target = "short-v0" if minari else str(folder / format_name)
            begin = time.perf_counter()
            written = export_dataset(dataset, target, format_name)
            between = time.perf_counter()
            import_dataset(target, folder / f"{format_name}-again", format_name)
            end = time.perf_counter()
            print(
                f"| {format_name} | {size(written):.2f} | {between - begin:.1f} "
                f"| {end - between:.1f} |"
            )
            if minari:
                groups = floor_of_minari(folder / "floor", options.episodes)
                print(f"| Minari's groups without data | {groups:.2f} | | |")


if __name__ == "__main__":
    main()
