"""Recorded episodes, for comparison with the library's rollout of the same actions."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect import Collector, RandomPolicy
from marl_collect.core.seeding import episode_seed

Array = NDArray[Any]


def episodes(
    factory: Callable[[], Any], frames: int, seed: int = 0
) -> Iterator[tuple[int, dict[tuple[str, ...], Array]]]:
    """Yield seed and arrays ``[T, ...]`` of each episode of random legal actions."""
    with Collector(
        factory,
        RandomPolicy(),
        frames_per_batch=frames,
        total_frames=frames,
        seed=seed,
    ) as collector:
        (batch,) = collector
    episode: Any = batch[0]
    numbers = episode["collector", "traj_ids"]
    keys = episode.keys(include_nested=True, leaves_only=True)
    for number in numbers.unique().tolist():
        rows = episode[numbers == number]
        yield (
            episode_seed(seed, 0, number),
            {
                key if isinstance(key, tuple) else (key,): rows[key].numpy()
                for key in keys
            },
        )


def assert_equal(actual: Array, expected: Any, location: str) -> None:
    """Compare two arrays bit by bit; the expected one is cast first."""
    cast = np.asarray(expected).astype(actual.dtype).reshape(actual.shape)
    assert np.array_equal(actual, cast), f"{location}: found {actual}, expected {cast}"


def assert_lists_equal(
    episode: dict[tuple[str, ...], Array],
    env: Any,
    seed: int,
    flags: Callable[[Any, bool, int], tuple[bool, bool]],
) -> int:
    """Replay an episode in a library's environment of lists; return its length.

    Args:
        episode: recorded arrays of the group ``agent``.
        env: the library's environment.
        seed: of the episode.
        flags: returns whether a frame is terminated and truncated, from the
            environment, the flag that it returned, and the number of the frame from 1.
    """
    observations, _ = env.reset(seed=seed)
    actions = episode["agent", "action"]
    for step in range(len(actions)):
        location = f"seed {seed}, step {step}"
        assert_equal(episode["agent", "observation"][step], observations, location)
        observations, rewards, over, _, _ = env.step(list(actions[step]))
        assert_equal(
            episode["next", "agent", "observation"][step], observations, location
        )
        assert_equal(episode["next", "agent", "reward"][step], rewards, location)
        terminated, truncated = flags(env, over, step + 1)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            assert episode["next", name][step, 0] == flag, location
            assert (episode["next", "agent", name][step] == flag).all(), location
    return len(actions)
