"""Task provider of PettingZoo: an entry point of ``marl_collect.tasks``.

It also builds ``"module:name"``: a custom PettingZoo environment or ``MultiAgentEnv``.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from marl_collect.envs.common import defaults_of, is_safe_number
from marl_collect.envs.family import UnknownTaskError
from marl_collect.envs.pettingzoo import tasks
from marl_collect.errors import MissingPackageError, install_command
from marl_collect.programs.task_providers import find_callable

_EXTRAS = {
    "sisl": "pettingzoo",
    "butterfly": "pettingzoo",
    "classic": "pettingzoo",
    "atari": "atari",
    "magent": "magent2",
    "mpe": "mpe",
}
"""Task family to the extra that installs it."""


_SAFE = (
    *("game_version", "mode_num", "num_agent_neighbors", "num_landmark_neighbors"),
    *("obs_method", "obs_type", "observation_type", "render_mode"),
)
"""Arguments of tasks, besides numbers, whose values name no code, file or folder."""


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
        ValueError: if ``"module:name"`` cannot be imported or called.
        MissingPackageError: if a package is missing; names the extra to install.
    """
    if ":" in task:
        find_callable(task)
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
        builder = find_callable(task)
        defaults = defaults_of(builder)
        # Only of a class it is known, without a call, that it needs the wrapper.
        ours = _wrapper_defaults() if _builds_pettingzoo(builder) else {}
        return defaults | {k: v for k, v in ours.items() if k not in defaults}
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    defaults = tasks.defaults(task)
    ours = defaults_of(PettingZooEnv)
    return defaults | {
        name: value for name, value in ours.items() if name not in defaults
    }


def is_safe(task: str, name: str, value: Any) -> bool:
    """Return whether a file from elsewhere may choose a keyword argument of a task.

    It may choose ``PettingZooEnv``'s keywords, and numbers where the default is one.
    Only the user chooses those of ``"module:name"``, and paths such as
    ``auto_rom_install_path``.
    """
    if ":" in task:
        return False
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    if name in _SAFE or name in defaults_of(PettingZooEnv):
        return True
    return is_safe_number(value, tasks.defaults(task).get(name))


def _build(name: str, **kwargs: Any) -> Any:
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    if "parallel" not in kwargs:
        try:
            tasks.find_task(name, parallel=True)
        except UnknownTaskError:  # find_task() has found it, so it is an AEC task
            kwargs["parallel"] = False
    return PettingZooEnv(name, **kwargs)


def _build_own(task: str, /, **kwargs: Any) -> Any:
    from marl_collect.core.env import TensorDictEnv

    builder = find_callable(task)
    names, takes_any = _parameters(builder)
    ours = _wrapper_defaults() if kwargs.keys() - names else {}
    wrapping = {k: kwargs[k] for k in kwargs if k in ours and k not in names}
    built = builder(**{k: kwargs[k] for k in kwargs if k not in wrapping})
    if not isinstance(built, TensorDictEnv):
        # Only here: other environments work without PettingZoo.
        from marl_collect.envs.pettingzoo.env import PettingZooWrapper

        return PettingZooWrapper(built, **wrapping)
    if not wrapping:
        return built
    built.close()
    if takes_any:  # It may pass them to a wrapper of its own.
        return builder(**kwargs)
    name = next(iter(wrapping))
    raise TypeError(
        f"{task} has no argument {name!r}, and the {type(built).__name__} that it "
        f"returns takes none any more: add a parameter {name} to the callable, or "
        "return the PettingZoo environment without a wrapper."
    )


def _parameters(builder: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keywords that a callable names, and whether it takes others too."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # Some compiled callables have no signature.
        return set(), True
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, _EITHER)}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _builds_pettingzoo(builder: Callable[..., Any]) -> bool:
    zoo = sys.modules.get("pettingzoo")  # A subclass has imported it.
    kinds = () if zoo is None else (zoo.ParallelEnv, zoo.AECEnv)
    return isinstance(builder, type) and issubclass(builder, kinds)


def _wrapper_defaults() -> dict[str, Any]:
    """Return the keywords of ``PettingZooWrapper``; none if PettingZoo is missing."""
    if importlib.util.find_spec("pettingzoo") is None:
        return {}
    from marl_collect.envs.pettingzoo.env import WrapperArguments

    return {
        argument.name: argument.default
        for argument in fields(WrapperArguments)
        if argument.kw_only
    }
