"""Tasks of a curriculum, which environments are told before they begin an episode."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from marl_collect.core.batch import EnvBatch

Curriculum = Callable[[int, int, int], Any]
"""Returns the task of an episode, given its seed, its number and the level."""


def set_tasks(
    engine: EnvBatch,
    curriculum: Curriculum,
    episodes: Iterable[tuple[int, int, int, int]],
    resetting: Callable[[int], None],
) -> None:
    """Tell environments the tasks of the episodes that they begin next.

    Args:
        engine: the environments.
        curriculum: of the user.
        episodes: index of the environment, seed, number of the episode, and level.
        resetting: called with each index first.
    """
    for k, seed, number, level in episodes:
        resetting(k)
        try:
            task = curriculum(seed, number, level)
        except Exception as error:
            error.add_note(
                f"The error was raised by curriculum(seed={seed}, episode={number}, "
                f"level={level})."
            )
            raise
        task = copy.deepcopy(task)  # An environment may change it.
        if engine.one_simulator:
            engine.call(k, "set_task", (k, task), {})
            engine.call(k, "require_begin", (k,), {})
        else:
            engine.call(k, "set_task", (task,), {})
