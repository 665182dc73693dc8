"""Task provider of PettingZoo: an entry point of ``marl_collect.tasks``.

It also builds ``"module:name"``: a custom PettingZoo environment or ``MultiAgentEnv``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from marl_collect.envs.common import defaults_of
from marl_collect.envs.errors import UnknownTaskError
from marl_collect.envs.pettingzoo import tasks
from marl_collect.errors import MissingPackageError, install_command

_EXTRAS = {
    "sisl": "pettingzoo",
    "butterfly": "pettingzoo",
    "classic": "pettingzoo",
    "atari": "atari",
    "magent": "magent2",
    "mpe": "mpe",
}
"""Task family to the extra that installs it."""


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions determine the data."""
    return ("pettingzoo", "mpe2", "box2d", "pymunk", "multi-agent-ale-py", "magent2")


def available_tasks() -> dict[str, str]:
    """Map each task, ``"<family>/<task>"``, to the command that completes it, if any.

    A family that is not installed has a single entry, such as ``"mpe/..."``.
    """
    return {
        name: install_command(_EXTRAS[name.split("/")[0]])
        if missing not in ("", tasks.DOWNLOAD_ROMS)
        else missing
        for name, missing in tasks.available_envs().items()
    }


def find_task(task: str) -> Callable[..., Any]:
    """Return a callable that builds the environment of ``task``.

    Args:
        task: name with or without its family, or ``"module:name"``.

    Raises:
        UnknownTaskError: if the task is unknown; names existing versions, if any.
        MissingPackageError: if a package is missing; names the extra to install.
    """
    if ":" in task:
        tasks.custom(task)
        return partial(_build_own, task)
    try:
        name = "/".join(tasks.locate(task))
    except UnknownTaskError:
        raise UnknownTaskError(tasks.advice_on(task)) from None
    if missing := available_tasks()[name]:
        raise MissingPackageError(f"{name} needs: {missing}")
    return partial(_build, name)


def picture_settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments with which ``render()`` returns images."""
    if ":" in task and "render_mode" not in settings(task):
        return {}
    return {"render_mode": "rgb_array"}


def settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments of the environment and their defaults.

    The task's arguments come first, then ``PettingZooEnv``'s.
    """
    if ":" in task:
        return defaults_of(tasks.custom(task))
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    defaults = tasks.defaults(task)
    ours = defaults_of(PettingZooEnv)
    return defaults | {
        name: value for name, value in ours.items() if name not in defaults
    }


def _build(name: str, **kwargs: Any) -> Any:
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    if "parallel" not in kwargs:
        try:
            tasks.find_task(name, parallel=True)
        except UnknownTaskError:  # find_task() has found it, so it is an AEC task
            kwargs["parallel"] = False
    return PettingZooEnv(name, **kwargs)


def _build_own(task: str, /, *, agent_ids: bool = False, **kwargs: Any) -> Any:
    from marl_collect.core.env import TensorDictEnv

    built = tasks.custom(task)(**kwargs)
    if not isinstance(built, TensorDictEnv):
        # Only here: other environments work without PettingZoo.
        from marl_collect.envs.pettingzoo.env import PettingZooWrapper

        return PettingZooWrapper(built, agent_ids=agent_ids)
    if agent_ids:
        raise ValueError(
            f"agent_ids=True needs a PettingZoo environment, but {task} builds a "
            f"{type(built).__name__}, which must append agent identities itself: leave "
            "agent_ids out."
        )
    return built
