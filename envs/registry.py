"""Every task by its name, whichever library it is from, for the command line.

Listed under the entry points ``marl_collect.tasks``. A task is found without
importing its library where the file system can tell.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from marl_collect.envs.pettingzoo import tasks
from marl_collect.envs.pettingzoo.tasks import MissingPackageError, UnknownTaskError

Builder = Callable[..., Any]
"""Takes the environment's keyword arguments."""

_EXTRAS = {
    "sisl": "pettingzoo",
    "butterfly": "pettingzoo",
    "classic": "pettingzoo",
    "atari": "atari",
    "magent": "magent2",
    "mpe": "mpe",
    "meltingpot": "meltingpot",
    "lab2d": "dmlab2d",
}
"""Family of tasks to the extra that installs it; of other families there is none."""

_PACKAGES = {"meltingpot": "meltingpot", "lab2d": "dmlab2d"}


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions determine what environments do."""
    return (
        "pettingzoo",
        "mpe2",
        "box2d",
        "pymunk",
        "multi-agent-ale-py",
        "magent2",
        "dm-meltingpot",
        "dmlab2d",
    )


def available_tasks() -> dict[str, str]:
    """List every task that this installation knows.

    Returns:
        Name such as ``"sisl/multiwalker_v9"`` or ``"meltingpot/coins"`` to what is
        missing to build it: ``""``, or the command that installs it. A family that
        is not installed is one entry, ``"mpe/..."``.
    """
    found = {
        name: _install(name.split("/")[0], missing) if missing else ""
        for name, missing in tasks.available_envs().items()
    }
    for family, package in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            found[f"{family}/..."] = _install(family, "")
    return found | dict.fromkeys((*_substrates(), *_levels()), "")


def find_task(task: str) -> Builder:
    """Return what builds the environment of ``task``, to be called in a worker.

    Args:
        task: name with or without its family; a scenario of MeltingPot; or
            ``"module:name"`` for a callable that returns a PettingZoo environment
            or one of ours.

    Raises:
        UnknownTaskError: with the nearest names, and the extras that may have it.
        MissingPackageError: with the extra to install.
    """
    if ":" in task:
        return _own(task)
    known = available_tasks()
    name = _full_name(task, known)
    if name is None:
        family = task.partition("/")[0]
        if family in _PACKAGES and f"{family}/..." in known:
            raise MissingPackageError(f"{task} needs: {known[f'{family}/...']}")
        if _is_scenario(task):
            return partial(_build_meltingpot, task.removeprefix("meltingpot/"))
        raise UnknownTaskError(_explain(task, known))
    if known[name]:
        raise MissingPackageError(f"{name} needs: {known[name]}")
    family, _, short = name.partition("/")
    if family == "meltingpot":
        return partial(_build_meltingpot, short)
    if family == "lab2d":
        return partial(_build_lab2d, short)
    return partial(_build_pettingzoo, name)


def picture_settings(task: str) -> dict[str, Any]:
    """Return what to build ``task`` with, so that ``render()`` gives pictures."""
    name = None if ":" in task else _full_name(task, available_tasks())
    ours = name is None or name.partition("/")[0] in _PACKAGES
    return {} if ours else {"render_mode": "rgb_array"}


def _build_meltingpot(name: str, **kwargs: Any) -> Any:
    from marl_collect.envs.meltingpot.env import MeltingpotEnv

    return MeltingpotEnv(name, **kwargs)


def _build_lab2d(level: str, **kwargs: Any) -> Any:
    from marl_collect.envs.lab2d.env import Lab2dEnv

    return Lab2dEnv(level, **kwargs)


def _build_pettingzoo(name: str, **kwargs: Any) -> Any:
    from marl_collect.envs.pettingzoo.env import PettingZooEnv

    if "parallel" not in kwargs:
        try:
            tasks.find_task(name, parallel=True)
        except UnknownTaskError:  # It exists, so its agents take turns.
            kwargs["parallel"] = False
    return PettingZooEnv(name, **kwargs)


def _build_own(task: str, /, *, agent_ids: bool = False, **kwargs: Any) -> Any:
    from marl_collect.core.env import TensorDictEnv
    from marl_collect.envs.pettingzoo.env import PettingZooWrapper

    built = _attribute(task)(**kwargs)
    if not isinstance(built, TensorDictEnv):
        return PettingZooWrapper(built, agent_ids=agent_ids)
    if agent_ids:
        raise ValueError(
            f"agent_ids=True is for PettingZoo environments, but {task} builds one of "
            f"type {type(built).__name__}: let it append identities itself."
        )
    return built


def _own(task: str) -> Builder:
    _attribute(task)
    return partial(_build_own, task)


def _attribute(task: str) -> Builder:
    module_name, _, path = task.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise UnknownTaskError(
            f"{task} must be module:name of something to import and call: {error}."
        ) from error
    if not callable(found):
        raise UnknownTaskError(f"{task} cannot be called: it is {found!r}.")
    builder: Builder = found
    return builder


def _full_name(task: str, known: dict[str, str]) -> str | None:
    """Return the name with its family; the first family in the list has priority."""
    if task in known and not task.endswith("..."):
        return task
    matches = (name for name in known if name.split("/")[1] == task != "...")
    return next(matches, None)


def _is_scenario(task: str) -> bool:
    if importlib.util.find_spec("meltingpot") is None:
        return False
    from marl_collect.envs.meltingpot.settings import scenarios

    return task.removeprefix("meltingpot/") in scenarios()


def _substrates() -> Iterator[str]:
    if importlib.util.find_spec("meltingpot") is None:
        return
    from marl_collect.envs.meltingpot.settings import substrates

    for name in substrates():
        yield f"meltingpot/{name}"


def _levels() -> Iterator[str]:
    """Read the names off the file system: dmlab2d has no list of what it ships."""
    spec = importlib.util.find_spec("dmlab2d")
    for place in (spec.submodule_search_locations if spec else None) or []:
        levels = Path(place, "lib", "game_scripts", "levels")
        for path in sorted(levels.glob("*/init.lua")):
            yield f"lab2d/{path.parent.name}"


def _install(family: str, otherwise: str) -> str:
    extra = _EXTRAS.get(family)
    return f'pip install "marl-collect[{extra}]"' if extra else otherwise


def _explain(task: str, known: dict[str, str]) -> str:
    short: dict[str, str] = {}
    for name in known:
        if not name.endswith("..."):
            short.setdefault(name.split("/")[1], name)
    prefix, _, stem = task.rpartition("/")
    try:
        tasks.find_task(task if prefix in tasks.FAMILIES else stem)
    except UnknownTaskError as error:
        text = str(error).split(" The nearest are ")[0]
    else:
        text = f"There is no task {task!r} here."
    near = difflib.get_close_matches(stem, short, n=4, cutoff=0.6)
    if near and "pip install" not in text:
        text += f" The nearest are {', '.join(short[name] for name in near)}."
    absent = {n.split("/")[0]: how for n, how in known.items() if n.endswith("...")}
    if absent:
        listed = "; ".join(f"{family}: {how}" for family, how in absent.items())
        text += f" Not installed here: {listed}."
    return text
