"""Tasks by name: whoever knows environments registers under ``marl_collect.tasks``.

An entry point of this group is a module, or any object, with two functions::

    find_task(name: str) -> Callable[..., environment]     # ValueError: unknown
    available_tasks() -> dict[name, what is missing]        # "" if nothing is

and, if it likes, ``picture_settings(name) -> dict[str, Any]``: keyword arguments with
which the environment's ``render()`` gives pictures. So the engine imports no
environment, and other packages can bring theirs.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

GROUP = "marl_collect.tasks"


class TaskProvider(Protocol):
    """What an entry point of the group offers."""

    def find_task(self, task: str) -> Callable[..., Any]:
        """Return what builds the environment; ValueError if there is none."""
        ...

    def available_tasks(self) -> dict[str, str]:
        """Return each task's name, and what is missing to build it."""
        ...


def find_factory(
    task: str, kwargs: dict[str, Any], *, pictures: bool = False
) -> Callable[[], Any]:
    """Return a factory for the environment of ``task``; nothing is built.

    Args:
        task: name of a task.
        kwargs: what to build it with.
        pictures: whether ``render()`` shall give any; adds what that needs to
            ``kwargs``, if the provider says so.

    Raises:
        ValueError: with the nearest names, if nobody knows the task.
        ImportError: with what to install.
    """
    if ":" in task:
        # As `python -m` does; console scripts do not see the user's own modules.
        sys.path.insert(0, os.getcwd())
    unknown: list[str] = []
    for provider in _providers():
        try:
            builder = provider.find_task(task)
            if pictures and hasattr(provider, "picture_settings"):
                kwargs = {**provider.picture_settings(task), **kwargs}
            return partial(builder, **kwargs)
        except ValueError as error:
            unknown.append(str(error))
    raise ValueError(" ".join(unknown))


def available_tasks() -> dict[str, str]:
    """Return each task's name and what is missing to build it."""
    found: dict[str, str] = {}
    for provider in _providers():
        found |= provider.available_tasks()
    return found


def parse_settings(settings: Sequence[str], option: str = "--env") -> dict[str, Any]:
    """Parse ``KEY=VALUE``; a value is JSON, or else text.

    Raises:
        ValueError: for a text without ``=``.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(
                f"{option} {setting} must be KEY=VALUE, for example "
                "--env n_walkers=4 or --env 'observations=[\"RGB\"]'."
            )
        parsed[key] = _value(value)
    return parsed


def _value(text: str) -> Any:
    if text in ("True", "False"):  # Python's spelling is what people type.
        return text == "True"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _providers() -> Iterator[TaskProvider]:
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    if not found:
        raise ValueError(
            "No tasks are registered: install the package, for example with "
            "`pip install -e .` in a checkout."
        )
    for entry in found:
        yield cast("TaskProvider", entry.load())
