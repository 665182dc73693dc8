"""``Family``: the task provider of a library whose tasks are built by one function."""

import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

from marl_collect.envs.errors import UnknownTaskError
from marl_collect.errors import MissingPackageError, install_command


@final
@dataclass(frozen=True)
class Family:
    """A ``TaskProvider`` of the tasks ``"<name>/<task>"``.

    Attributes:
        name: prefix of the tasks.
        extra: extra of this package that installs the libraries.
        modules: modules without which no task can be built. They are not imported.
        distributions: distributions whose versions determine the data.
        listed: returns the tasks to list, without the prefix. Called only if all
            modules are installed.
        known: whether a task exists. It may be one that is not listed.
        env: ``"module:class"`` of the environment, which is built from the name of a
            task and keyword arguments. Imported when a task is built.
        defaults: returns the keyword arguments of a task and their defaults.
        batched: whether the environment is a ``BatchedEnv``. Otherwise it is built on
            ``PettingZooBase`` and has the keywords of ``PettingZooWrapper`` too.
    """

    name: str
    extra: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    listed: Callable[[], Iterable[str]]
    known: Callable[[str], bool]
    env: str
    defaults: Callable[[str], Mapping[str, Any]]
    batched: bool = False

    def packages(self) -> tuple[str, ...]:
        """Return the distributions whose versions determine the data."""
        return self.distributions

    def available_tasks(self) -> dict[str, str]:
        """Map each listed task to the command that completes it, if any."""
        if self._missing():
            return {f"{self.name}/...": install_command(self.extra)}
        return {f"{self.name}/{task}": "" for task in self.listed()}

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
        settings = dict(self.defaults(self._name(task)))
        if self.batched:
            return settings
        from marl_collect.envs.pettingzoo.description import PettingZooOptions

        wrapping = {option.name: option.default for option in fields(PettingZooOptions)}
        return settings | wrapping

    def _name(self, task: str) -> str:
        family, _, name = task.partition("/")
        if family != self.name:
            raise UnknownTaskError
        if missing := self._missing():
            raise MissingPackageError(
                f"{task} needs {', '.join(missing)}: {install_command(self.extra)}"
            )
        if not self.known(name):
            raise UnknownTaskError
        return name

    def _missing(self) -> list[str]:
        return [m for m in self.modules if importlib.util.find_spec(m) is None]


def _build(env: str, task: str, /, **kwargs: Any) -> Any:
    return pkgutil.resolve_name(env)(task, **kwargs)
