"""Finds tasks by name, through the registered ``TaskProvider`` objects."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from marl_collect.options import did_you_mean, nearest
from marl_collect.programs.task_providers import (
    TaskProvider,
    find_callable,
    module_of,
    providers,
)


def find_factory(
    task: str, kwargs: dict[str, Any], *, pictures: bool = False
) -> Callable[[], Any]:
    """Return a factory for the environment of ``task``, without building it.

    Args:
        task: name of a task.
        kwargs: keyword arguments of the environment.
        pictures: whether ``render()`` must return pictures; adds the provider's
            ``picture_settings`` to ``kwargs``.

    Raises:
        ValueError: if no provider knows the task; lists similar names.
        ImportError: if a package is missing; says what to install.
    """
    provider, builder = _find(task)
    if pictures and hasattr(provider, "picture_settings"):
        kwargs = {**provider.picture_settings(task), **kwargs}
    return partial(builder, **kwargs)


def find_provider(task: str) -> TaskProvider:
    """Return the provider that builds a task.

    Raises:
        ValueError: if no provider knows the task; lists similar names.
        ImportError: if a package is missing; says what to install.
    """
    return _find(task)[0]


def task_settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments of a task and their defaults, as far as known.

    Raises:
        ValueError: if no provider knows the task; lists similar names.
        ImportError: if a package is missing; says what to install.
    """
    provider, _builder = _find(task)
    settings: Callable[[str], dict[str, Any]] = getattr(
        provider, "settings", lambda _: {}
    )
    return settings(task)


def is_own(task: str) -> bool:
    """Return whether ``task`` names the user's own code, ``"module:name"``."""
    return ":" in task


def is_task(name: str) -> bool:
    """Return whether a provider knows a task; packages that it needs may be missing."""
    for provider in _providers():
        try:
            provider.find_task(name)
        except ImportError:
            return True
        except ValueError:
            continue
        return True
    return False


def available_tasks() -> dict[str, str]:
    """Return each task's name and the command that installs what it lacks."""
    tasks: dict[str, str] = {}
    for provider in _providers():
        tasks |= provider.available_tasks()
    return tasks


def parse_settings(settings: Sequence[str], option: str = "--env") -> dict[str, Any]:
    """Parse ``KEY=VALUE``; a value is JSON, or text if it is not valid JSON.

    Raises:
        ValueError: if a setting has no key or no ``=``.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(
                f"{option} {setting} must be KEY=VALUE, for example {option} size=4 or "
                f'{option} \'names=["a", "b"]\'.'
            )
        if value in ("True", "False"):  # Many users write Python's spelling.
            value = value.lower()
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return parsed


def find_curriculum(name: str | None, level: int = 0) -> dict[str, Any]:
    """Return the arguments of collectors for ``--curriculum`` and ``--level``.

    Args:
        name: ``"module:function"``; None without a curriculum.
        level: of the curriculum.

    Raises:
        ValueError: if it cannot be imported, or if there is a level without it.
        TypeError: if it is no function of seed, episode and level.
    """
    if name is None:
        if level:
            raise ValueError(
                f"--level {level} is that of a curriculum: add --curriculum "
                "MODULE:FUNCTION."
            )
        return {}
    from marl_collect.core.factories import check_function

    _see_own_modules()
    function = find_callable(name)
    example = "curriculum(seed, episode, level)"
    check_function(f"--curriculum {name}", function, example, "a task")
    return {"curriculum": function, "level": level}


def _see_own_modules() -> None:
    """Find modules in the working directory, as `python -m` does."""
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())


def _find(task: str) -> tuple[TaskProvider, Callable[..., Any]]:
    """Return the first provider that knows a task, and what it found.

    Raises:
        ValueError: if no provider knows the task; lists similar names.
        ImportError: if a package is missing; says what to install.
    """
    if is_own(task):
        _see_own_modules()
    hints: list[str] = []
    for provider in _providers():
        try:
            return provider, provider.find_task(task)
        except ValueError as error:
            hints.append(str(error))
    raise ValueError(_explain(task, hints))


def _explain(task: str, hints: Sequence[str]) -> str:
    """Return the message for a task that no provider knows."""
    if re.match(r"\w+\(", task):
        return (
            f"{task} is a wrapped environment, which cannot be built from its name. "
            "Write a function that builds it, and pass module:function as the task."
        )
    known = available_tasks()
    short: dict[str, str] = {}
    for name in known:
        if not name.endswith("..."):
            short.setdefault(name.rpartition("/")[2], name)
    text = " ".join([f"There is no task {task!r}.", *filter(None, hints)])
    file = task.removesuffix(".py") + ".py"
    if Path(file).is_file():
        text += f" For what {file} builds, add its name: {module_of(file)}:NAME."
    stem = task.rpartition("/")[2]
    family = task.rpartition("/")[0]
    families = sorted({name.split("/")[0] for name in known})
    if family and family not in families and not is_own(task):
        text += f" {family!r} is no family of tasks: expected {', '.join(families)}."
    if "pip install" not in text:
        text += did_you_mean(nearest(stem, short))
    absent = {n.split("/")[0]: how for n, how in known.items() if n.endswith("...")}
    if absent:
        listed = "; ".join(f"{family}: {how}" for family, how in absent.items())
        text += f" Families that are not installed: {listed}."
    return text


def _providers() -> list[TaskProvider]:
    registered = providers()
    if not registered:
        raise ValueError(
            "No tasks are registered: install the package, for example with "
            "`pip install -e .` in a checkout."
        )
    return registered
