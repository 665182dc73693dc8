"""Finds the environment families that are registered under ``marl_collect.tasks``.

An entry point of this group is a module, or any object, that implements
``TaskProvider``. So the engine names no environment library, and other packages can
register their own environments.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

GROUP = "marl_collect.tasks"


class TaskProvider(Protocol):
    """Finds environments by name.

    A provider may have five further attributes:

    - ``priority: int``, 0 by default. If two providers know the same name, the one with
      the higher priority gets it.
    - ``picture_settings(task) -> dict`` returns the keyword arguments with which
      ``render()`` returns pictures.
    - ``settings(task) -> dict`` returns the keyword arguments of the environment and
      their defaults, as far as they are known. The command line shows them.
    - ``is_safe(task, name, value) -> bool`` returns whether a run folder or a dataset
      that somebody else wrote may choose this keyword argument: its value names no
      code, no file and no folder. ``"settings.size"`` is the entry ``size`` of a
      mapping. Without this attribute only the user chooses keyword arguments.
    - ``packages() -> Sequence[str]`` returns the distributions whose versions determine
      the data. Datasets record these versions.
    """

    def find_task(self, task: str) -> Callable[..., Any]:
        """Return a callable that builds the environment.

        Raises:
            ValueError: if the task is unknown. The message is a hint, such as the
                versions that exist, or empty.
        """
        ...

    def available_tasks(self) -> dict[str, str]:
        """Return each task's name and the command that installs what it lacks.

        The command is empty if nothing is missing.
        """
        ...


def providers() -> list[TaskProvider]:
    """Return the registered providers, by priority and then by entry point name."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    loaded = [cast("TaskProvider", entry.load()) for entry in entries]
    return sorted(loaded, key=lambda provider: -getattr(provider, "priority", 0))


def packages() -> list[str]:
    """Return the packages that determine the data of the registered environments."""
    names: dict[str, None] = {}
    for provider in providers():
        names |= dict.fromkeys(getattr(provider, "packages", tuple)())
    return list(names)


def module_of(file: str) -> str:
    """Return the name with which a file is imported, from its folder or one above."""
    path, here = Path(file.removesuffix(".py")).resolve(), Path.cwd()
    below = path.is_relative_to(here)
    return ".".join(path.relative_to(here).parts if below else [path.name])


def _advice(module: str, name: str) -> str:
    """Return what to write if the module's file was named, otherwise nothing."""
    if "/" not in module and not module.endswith(".py"):
        return ""
    is_below = Path(module).resolve().is_relative_to(Path.cwd())
    folder = "" if is_below else " in its folder"
    return f" Name the module, not its file: {module_of(module)}:{name}{folder}."


def find_callable(name: str) -> Callable[..., Any]:
    """Return the callable of ``"module:name"``.

    Raises:
        ValueError: if it cannot be imported or called.
    """
    module, _, path = name.partition(":")
    try:
        if module.startswith("."):  # import_module raises a TypeError.
            raise ImportError("a module's name does not begin with a dot")
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} must be module:name of a callable, but importing it failed: "
            f"{error}.{_advice(module, path)}"
        ) from error
    if not callable(found):
        raise ValueError(  # noqa: TRY004 - the name is wrong, not its type
            f"{name} must be module:name of a callable, but is {found!r}."
        )
    result: Callable[..., Any] = found
    return result
