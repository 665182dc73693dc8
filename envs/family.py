"""``Family``: the task provider of a library whose tasks are built by one function."""

import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, final

from marl_collect.envs.common import defaults_of, is_safe_number
from marl_collect.errors import MissingPackageError, install_command
from marl_collect.options import did_you_mean, nearest


class UnknownTaskError(ValueError):
    """No installed task has this name. The message says where to find it, if known."""


def folders_of(package: str) -> list[Path]:
    """Return the folders of a package, which is not imported; none if it is missing."""
    spec = importlib.util.find_spec(package)
    return [Path(f) for f in (spec and spec.submodule_search_locations) or []]


@final
@dataclass(frozen=True)
class Family:
    """A ``TaskProvider`` of the tasks ``"<name>/<task>"``.

    Attributes:
        name: prefix of the tasks.
        extra: extra of this package that installs the libraries.
        modules: modules without which no task can be built. They are not imported.
        distributions: distributions whose versions determine the data.
        listed: returns the tasks to list, without the prefix, or maps them to the
            commands that complete them. Called only if all modules are installed.
        known: whether a task exists. It may be one that is not listed.
        env: ``"module:class"`` of the environment, which is built from the name of a
            task and keyword arguments. Imported when a task is built.
        defaults: returns the keyword arguments of a task and their defaults. None:
            those of the environment's class, which are the same for every task.
        pettingzoo: whether the environment is built on ``PettingZooBase``, so it has
            the keywords of ``PettingZooWrapper`` too.
        safe: keyword arguments that a file from elsewhere may choose, because no value
            of them names code, a file or a folder. ``"settings.size"`` is an entry of a
            mapping. Numbers need not be named here; see ``is_safe``.
        needs_prefix: False if a task is also found by its name without the prefix.
        priority: the family with the highest one gets a name that several know.
    """

    name: str
    extra: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    listed: Callable[[], Iterable[str] | Mapping[str, str]]
    known: Callable[[str], bool]
    env: str
    defaults: Callable[[str], Mapping[str, Any]] | None = None
    pettingzoo: bool = True
    safe: tuple[str, ...] = ()
    needs_prefix: bool = True
    priority: int = 0

    def packages(self) -> tuple[str, ...]:
        """Return the distributions whose versions determine the data."""
        return self.distributions

    def available_tasks(self) -> dict[str, str]:
        """Map each listed task to the command that completes it, if any."""
        if self._missing():
            return {f"{self.name}/...": install_command(self.extra)}
        tasks = self.listed()
        if not isinstance(tasks, Mapping):
            tasks = dict.fromkeys(tasks, "")
        return {f"{self.name}/{task}": command for task, command in tasks.items()}

    def find_task(self, task: str) -> Callable[..., Any]:
        """Return a callable that builds the environment of ``task``.

        Raises:
            UnknownTaskError: if the family has no task of this name.
            MissingPackageError: if a library is missing; names the extra to install.
        """
        return partial(_build, self.env, self._name(task))

    def settings(self, task: str) -> dict[str, Any]:
        """Return the keyword arguments of a task and their defaults.

        The task's arguments come first, then ``PettingZooWrapper``'s, if it has them.

        Raises:
            UnknownTaskError: if the family has no task of this name.
            MissingPackageError: if a library is missing; names the extra to install.
        """
        name = self._name(task)
        if self.defaults is None:
            settings = defaults_of(pkgutil.resolve_name(self.env))
        else:
            settings = dict(self.defaults(name))
        if not self.pettingzoo:
            return settings
        return settings | _wrapping()

    def is_safe(self, task: str, name: str, value: Any) -> bool:
        """Return whether a file from elsewhere may choose a keyword argument of a task.

        It may if ``safe`` has the name, or if the argument is a number by default and
        the value is one; also if ``PettingZooWrapper`` has the keyword.

        Raises:
            UnknownTaskError: if the family has no task of this name.
            MissingPackageError: if a library is missing; names the extra to install.
        """
        if name in self.safe or (self.pettingzoo and name in _wrapping()):
            return True
        return is_safe_number(value, self.settings(task).get(name))

    def require(self, task: Any) -> None:
        """Check the name of a task, without the prefix.

        Raises:
            TypeError: if it is no text.
            UnknownTaskError: if the family has no such task; names similar ones.
            MissingPackageError: if a library is missing; names the extra to install.
        """
        if not isinstance(task, str):
            raise TypeError(
                f"The environment must be the name of a task of {self.name}, but is "
                f"{task!r:.100}. {self._where()}"
            )
        self._installed(task)
        if not self.known(task):
            hint = did_you_mean(nearest(task, self.listed()))
            raise UnknownTaskError(
                f"{self.name} has no task {task!r}.{hint} {self._where()}"
            )

    def _where(self) -> str:
        return f"`marl-collect envs {self.name}` lists tasks."

    def _installed(self, task: str) -> None:
        if missing := self._missing():
            raise MissingPackageError(
                f"{task} needs {', '.join(missing)}: {install_command(self.extra)}",
                name=missing[0],
            )

    def _name(self, task: str) -> str:
        family, _, name = task.rpartition("/")
        if family != self.name and (family or self.needs_prefix):
            raise UnknownTaskError
        if not family and self._missing():
            raise UnknownTaskError
        self._installed(task)
        if not self.known(name):
            raise UnknownTaskError
        return name

    def _missing(self) -> list[str]:
        return [m for m in self.modules if importlib.util.find_spec(m) is None]


def _wrapping() -> dict[str, Any]:
    """Return the keywords of ``PettingZooWrapper`` and their defaults."""
    from marl_collect.envs.pettingzoo.description import PettingZooOptions

    return {option.name: option.default for option in fields(PettingZooOptions)}


def _build(env: str, task: str, /, **kwargs: Any) -> Any:
    return pkgutil.resolve_name(env)(task, **kwargs)
