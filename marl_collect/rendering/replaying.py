"""Takes pictures of a recorded episode by repeating its actions."""

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.layout import LEVEL, TRAJ_IDS
from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.env import require_factory
from marl_collect.processes import cleanup
from marl_collect.rendering.pictures import Picture, SingleEnv, require_single, take
from marl_collect.rollout.env_calls import set_task
from marl_collect.rollout.episodes import EPISODE_BITS, Curriculum


def to_frames(
    create_env_fn: Callable[[], Any],
    rollout: TensorDictBase,
    *,
    seed: int,
    curriculum: Curriculum | None = None,
) -> NDArray[np.uint8]:
    """Return pictures of a recorded episode: the first state, and one after each frame.

    The environment is built here, reset with the episode's seed, and takes the
    recorded actions. Its observations are compared with the record, including those
    after the last action.

    Args:
        create_env_fn: the factory that the episode was recorded with, rendering
            pictures (PettingZoo's need ``render_mode="rgb_array"``).
        rollout: ``[T]`` from the episode's first frame on, such as a trajectory of a
            dataset or ``env.rollout(...)``.
        seed: that the episode was reset with: ``dataset.trajectories.seeds[i]``, or
            ``marl_collect.core.seeding.episode_seed(seed, environment, episode)``.
        curriculum: the function that the episode was recorded with, if any. The
            environment is told the task of the recorded level.

    Returns:
        uint8 ``[T + 1, height, width, 3]``.

    Raises:
        ValueError: if the environment renders nothing, does not repeat episodes, or
            differs from the record, naming frame and key. Also if the record has a
            level but ``curriculum`` is missing, or the other way round.
    """
    pictures = replay_pictures(create_env_fn, rollout, seed=seed, curriculum=curriculum)
    return np.stack(list(pictures))


def replay_pictures(
    create_env_fn: Callable[[], Any],
    rollout: TensorDictBase,
    *,
    seed: int,
    curriculum: Curriculum | None = None,
) -> Iterator[Picture]:
    """Yield the pictures of ``to_frames`` one by one; long episodes take no memory.

    Raises:
        ValueError: as ``to_frames``.
    """
    require_factory(create_env_fn, "create_env_fn")
    if rollout.ndim != 1:
        raise ValueError(
            f"rollout must be one episode [T], but has the shape {list(rollout.shape)}."
        )
    number, level = _recorded(rollout, curriculum)
    env = require_single(create_env_fn())
    owner = _Owner(env)
    try:
        engine = env.engine()
        if curriculum is not None:
            set_task(engine, 0, curriculum, seed, number, level)
        yield from _pictures(env, engine, rollout, seed)
    finally:
        owner.close()


def _recorded(
    rollout: TensorDictBase, curriculum: Curriculum | None
) -> tuple[int, int]:
    """Return number and level of an episode of a curriculum; zeros without one."""
    level = rollout.get(LEVEL, None)
    if level is None and curriculum is None:
        return 0, 0
    if curriculum is None:
        raise ValueError(
            "The episode was recorded with a curriculum, whose tasks are not in the "
            "record: pass the same function as to_frames(..., curriculum=function)."
        )
    ids = rollout.get(TRAJ_IDS, None)
    if level is None or ids is None:
        missing = LEVEL if level is None else TRAJ_IDS
        raise ValueError(
            f"With a curriculum, rollout needs {LEVEL} and {TRAJ_IDS} of the record, "
            f"but {missing} is missing."
        )
    return int(ids[0]) % 2**EPISODE_BITS, int(level[0])


@final
class _Owner:
    """Closes an environment once, at exit at the latest.

    A generator that is left half way is closed after the exit, when the modules that
    the environment uses are gone.
    """

    def __init__(self, env: SingleEnv) -> None:
        self._env: SingleEnv | None = env
        cleanup.register(self)

    def close(self, timeout: float = 0.0) -> None:
        del timeout  # Closing does not wait.
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _observations(
    description: EnvDescription, rollout: TensorDictBase
) -> tuple[dict[Key, NDArray[Any]], dict[Key, NDArray[Any]]]:
    """Return the environment's observations before and after each frame, by key.

    Where the policy has changed them, only those under ``next`` are the environment's.
    A single frame does not tell.
    """
    keys = [key for key in description.observed() if "observation" in key]
    parts: tuple[Any, Any] = rollout, rollout.get("next", {})
    before, after = (  # The latter has none with compact_obs.
        {k: v.numpy() for k in keys if (v := part.get(k, None)) is not None}
        for part in parts
    )
    for key in before.keys() & after.keys():
        same = np.array_equal(before[key][1:], after[key][:-1], equal_nan=True)
        if len(rollout) == 1 or not same:
            del before[key]
    return before, after


def _pictures(
    env: SingleEnv, engine: EnvBatch, rollout: TensorDictBase, seed: int
) -> Iterator[Picture]:
    description = env.description
    if not description.repeats:
        raise ValueError(
            f"{description.name} does not repeat an episode from its seed and actions, "
            "so pictures must be taken while it is played: use play(), or record "
            "pictures as observations."
        )
    memory = engine.allocate()
    engine.bind(memory)
    actions = {key: rollout.get(key).numpy() for key in description.actions()}
    before, after = _observations(description, rollout)

    def compare(key: Key, recorded: NDArray[Any], when: str) -> None:
        if not np.array_equal(memory[key][0], recorded, equal_nan=True):
            raise ValueError(
                f"{description.name} differs from the record: {when} its observation "
                f"at {'/'.join(key)} is not the recorded one. {advice}"
            )

    engine.reset([0], [seed])
    yield take(env)
    last = len(rollout) - 1
    advice = f"Check the factory and the episode's seed, here {seed}."
    for t in range(len(rollout)):
        for key, recorded in before.items():
            compare(key, recorded[t], f"at frame {t}")
        for key, recorded in after.items() if t else ():
            compare(key, recorded[t - 1], f"at frame {t}")
        for key, recorded_actions in actions.items():
            memory[key][0] = recorded_actions[t]
        engine.step()
        yield take(env)
        if t < last and memory["done",][0, 0]:
            raise ValueError(
                f"{description.name} differs from the record: its episode ends "
                f"with frame {t}, but the record has {len(rollout)} frames. {advice}"
            )
    for key, recorded in after.items():
        compare(key, recorded[last], f"after frame {last}, the last one,")
