"""Film an episode of a trained run, small enough for a page.

python scripts/film.py runs/walk/ippo-local-shared-ids/seed_0 walkers.gif --frames 200
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from marl_collect import play, write_video
from marl_collect.cli.tasks import find_factory
from marl_collect.models import load_policy


def main() -> None:
    """Write the video."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("video", type=Path)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--every", type=int, default=3, help="keep every third picture")
    parser.add_argument(
        "--width", type=int, default=420, help="of the video, in pixels"
    )
    parser.add_argument("--stochastic", action="store_true", help="sample actions")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = json.loads((arguments.run / "config.json").read_text())
    factory = find_factory(config["task"], config["env_kwargs"], pictures=True)
    policy = load_policy(arguments.run)
    pictures = play(
        factory,
        policy,
        max_frames_per_traj=arguments.frames,
        deterministic=not arguments.stochastic,
        seed=arguments.seed,
        overlay=True,
    )
    selected = islice(pictures, 0, None, arguments.every)
    small = (_resized(picture, arguments.width) for picture in selected)
    print(write_video(arguments.video, small, fps=15, scale=1), "pictures")


def _resized(picture: Any, width: int) -> Any:
    height = round(picture.shape[0] * width / picture.shape[1])
    return np.asarray(Image.fromarray(picture).resize((width, height)))


if __name__ == "__main__":
    main()
