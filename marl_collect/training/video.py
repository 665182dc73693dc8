"""Records an episode of trained weights as a video."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tensordict.nn import InteractionType, set_interaction_type

from marl_collect.training.evaluating import FINAL_SEED
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.run_folder import BEST, RunFolder
from marl_collect.training.trainer import Task, make_learner

_FRAMES = 1000
_FPS = 30


def record_video(
    task: Task, setup: Setup, options: TrainingOptions, folder: RunFolder, path: Path
) -> None:
    """Write a video of an episode with the best weights of a finished run.

    Args:
        task: of the run; its factory must accept ``render_mode="rgb_array"``.
        setup: of the run.
        options: of the run.
        folder: of the run.
        path: of the video; the suffix determines the format.

    Raises:
        ImportError: if imageio is not installed.
    """
    policy = make_learner(task, setup, options, 0).policy
    policy.load_state_dict(folder.read_checkpoint(BEST)["networks"]["policy"])
    limit = options.max_frames_per_traj or task.description.time_limit or _FRAMES
    write_video(film(task.factory, policy.cpu(), limit), path)


def film(factory: Callable[..., Any], policy: Any, max_frames: int) -> list[Any]:
    """Return the pictures of one episode, ``[height, width, 3]`` uint8 each."""
    env = partial(factory, render_mode="rgb_array")()
    pictures: list[Any] = []

    def act(tensordict: Any) -> Any:
        pictures.append(env.render())
        return policy(tensordict)

    try:
        env.set_seed(FINAL_SEED)
        with set_interaction_type(InteractionType.DETERMINISTIC):
            env.rollout(max_frames, act)
    finally:
        env.close()
    return pictures


def write_video(pictures: list[Any], path: Path) -> None:
    """Write pictures as a video."""
    import imageio.v3 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    # The codec needs even sizes. Larger blocks would resize every picture.
    imageio.imwrite(path, pictures, fps=_FPS, macro_block_size=2)
