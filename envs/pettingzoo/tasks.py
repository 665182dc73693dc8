"""PettingZoo tasks by name: finding installed tasks, and advice for missing ones.

A task is ``"multiwalker_v9"``, ``"sisl/multiwalker_v9"`` or ``"module:name"``. Only
the family of the task is imported. Task names are read from the file system, so that a
new version of PettingZoo needs no change here.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from marl_collect.envs.common import defaults_of
from marl_collect.envs.family import UnknownTaskError, folders_of
from marl_collect.errors import MissingPackageError
from marl_collect.options import did_you_mean, nearest
from marl_collect.programs.task_providers import find_callable


@dataclass(frozen=True)
class TaskPackage:
    """Tasks that are installed together.

    Attributes:
        package: package whose submodules ``<name>_v<number>`` are the tasks.
        install: argument of ``pip install``.
        requires: modules that all tasks of the family import.
        extra: prefix of task names to further modules that these tasks import.
    """

    package: str
    install: str
    requires: tuple[str, ...] = ("pygame",)
    extra: dict[str, tuple[str, ...]] = field(default_factory=dict)


_ATARI = "pettingzoo.atari"

FAMILIES = {
    "sisl": TaskPackage(
        "pettingzoo.sisl",
        "pettingzoo[sisl]",
        extra={"multiwalker": ("Box2D",), "pursuit": ("scipy",)},
    ),
    "butterfly": TaskPackage(
        "pettingzoo.butterfly",
        "pettingzoo[butterfly]",
        extra={"pistonball": ("pymunk",)},
    ),
    "classic": TaskPackage(
        "pettingzoo.classic",
        "pettingzoo[classic]",
        extra={
            "chess": ("chess",),
            "hanabi": ("shimmy", "pyspiel"),
            "leduc_holdem": ("rlcard",),
            "texas_holdem": ("rlcard",),
        },
    ),
    "atari": TaskPackage(
        _ATARI,
        "pettingzoo[atari]",
        requires=("pygame", "multi_agent_ale_py"),
    ),
    "mpe": TaskPackage("mpe2", "mpe2"),
    "magent": TaskPackage("magent2.environments", "magent2"),
}

_SAME_FAMILY = {"mpe2": "mpe", "magent2": "magent"}

_ABSENT_FAMILIES = {
    "mpe": re.compile(r"simple(_\w+)?|collect_treasure"),
    "magent": re.compile(
        r"adversarial_pursuit|battle|battlefield|combined_arms|gather|tiger_deer"
    ),
}
"""Task names of families whose packages may not be installed."""

_REMOVED = {
    "waterworld": 'left PettingZoo with 1.26: pip install "pettingzoo[sisl]<1.26" '
    '"pymunk<7"',
    "gin_rummy": "left PettingZoo with 1.26; RLCard still has the game",
    "prison": "left PettingZoo with 1.16",
    "prospector": "left PettingZoo with 1.16",
}

DOWNLOAD_ROMS = "AutoROM --accept-license (downloads the ROMs)"
"""What an Atari task without ROMs needs."""

_RENDER_MODE = "render_mode"
"""An argument that every environment of PettingZoo has."""

_VERSIONED = re.compile(r"(?P<name>\w+)_v(?P<version>\d+)")


def available_envs() -> dict[str, str]:
    """List the tasks of every family.

    Returns:
        Task name, such as ``"sisl/multiwalker_v9"``, to ``""`` if the task can be
        built, otherwise to a text with the command that installs what is missing. A
        family whose package is not installed has a single entry, such as
        ``"mpe/..."``. No task is imported or built. Atari's ROMs are missing if there
        is none at all.
    """
    tasks_by_name: dict[str, str] = {}
    for name, family in FAMILIES.items():
        tasks = _tasks(family)
        for task in tasks:
            tasks_by_name[f"{name}/{task}"] = _missing(family, task)
        if not tasks:
            tasks_by_name[f"{name}/..."] = f'pip install "{family.install}"'
    return tasks_by_name


def find_task(task: str, *, parallel: bool = True) -> Callable[..., Any]:
    """Return a callable that builds the environment of ``task``.

    Args:
        task: name with or without its family, or ``"module:name"`` of any callable
            that returns a ``ParallelEnv`` or ``AECEnv``.
        parallel: True for a ``ParallelEnv``, False for an ``AECEnv``. Ignored for
            ``"module:name"``.

    Raises:
        UnknownTaskError: if the task is unknown; names other versions or similar
            tasks.
        ValueError: if ``"module:name"`` cannot be imported or called.
        MissingPackageError: if a package is missing; names what to install.
        TypeError: if ``task`` is no name.
    """
    if not isinstance(task, str):
        raise TypeError(
            "task must be a name, such as 'simple_spread_v3' or 'module:name', but is "
            f"{task!r:.100}. For an environment of your own, pass a factory: "
            "lambda: PettingZooWrapper(MyEnv())."
        )
    if ":" in task:
        return find_callable(task)
    family, name = locate(task)
    module = _import(FAMILIES[family], name, task)
    attribute = "parallel_env" if parallel else "env"
    builder: Callable[..., Any] | None = getattr(module, attribute, None)
    if builder is None:
        raise UnknownTaskError(
            f"{task} has no {attribute}(): it exists only as an AEC environment. Pass "
            f"parallel=False: PettingZooEnv({task!r}, parallel=False)."
        )
    return builder


def locate(task: str) -> tuple[str, str]:
    """Return the family and the name of an installed task.

    Raises:
        UnknownTaskError: if the task is unknown; names other versions or similar
            tasks.
    """
    prefix, slash, name = task.rpartition("/")
    if not slash:
        holders = [key for key, family in FAMILIES.items() if name in _tasks(family)]
        if not holders:
            raise _unknown(task, name)
        return holders[0], name
    key = _SAME_FAMILY.get(prefix, prefix)
    if key not in FAMILIES:
        raise UnknownTaskError(
            f"There is no task family {prefix!r}: expected one of {sorted(FAMILIES)}, "
            "or module:name for a custom environment."
        )
    if name not in _tasks(FAMILIES[key]):
        raise _unknown(task, name, key)
    return key, name


def defaults(task: str) -> dict[str, Any]:
    """Return the keyword arguments of a task and their defaults, as far as known.

    If the task passes ``**kwargs`` on, the arguments of its environment are added.

    Raises:
        UnknownTaskError: if the task is unknown.
        MissingPackageError: if a package is missing.
    """
    family, name = locate(task)
    builder = getattr(_import(FAMILIES[family], name, task), "raw_env", None)
    arguments = {} if builder is None else defaults_of(builder)
    if builder is None or _RENDER_MODE in arguments:
        return arguments
    return _environment_defaults(builder) | arguments


def _environment_defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of the environment that gets the ``**kwargs`` of ``builder``.

    It is the callable with a ``render_mode``, which all of PettingZoo's environments
    have. Its name is in the builder's module, or a module that this one imports from.
    """
    home = sys.modules[builder.__module__]
    library = builder.__module__.partition(".")[0]
    sources = [
        sys.modules[function.__module__] for function in _callables(home, library)
    ]
    for module in [home, *sources]:
        for function in _callables(module, library):
            arguments = defaults_of(function)
            if _RENDER_MODE in arguments:
                return arguments
    return {}


def _callables(module: ModuleType, library: str) -> list[Callable[..., Any]]:
    """Return what a module names of its library, without wrappers and conversions."""
    return [
        value
        for value in vars(module).values()
        if callable(value)
        and (home := str(getattr(value, "__module__", ""))).startswith(library)
        and "utils" not in home
    ]


def advice_on(task: str) -> str:
    """Return advice on a task that is not installed, or ``""`` if there is none."""
    name = task.rpartition("/")[2]
    match = _VERSIONED.fullmatch(name)
    stem = match["name"] if match else name
    versions = [t for t in _installed() if t.split("/")[1].rpartition("_v")[0] == stem]
    if versions:
        return f"This installation has {' and '.join(versions)}."
    if stem in _REMOVED:
        return f"{stem} {_REMOVED[stem]}."
    for key, pattern in _ABSENT_FAMILIES.items():
        if pattern.fullmatch(stem) and not _tasks(FAMILIES[key]):
            install = FAMILIES[key].install
            return f'It is in a separate package: pip install "{install}".'
    return ""


def _unknown(task: str, name: str, family: str = "") -> UnknownTaskError:
    """Return the error for an unknown task; suggestions from ``family`` come first."""
    hint = advice_on(task)
    if not hint and not any(_tasks(FAMILIES[key]) for key in ("sisl", "classic")):
        hint = 'PettingZoo is not installed: pip install "pettingzoo[sisl]".'
    if not hint:
        ordered = sorted(_installed(), key=lambda t: not t.startswith(f"{family}/"))
        short = {t.split("/")[1]: t for t in reversed(ordered)}
        hint = did_you_mean(nearest(name, short, cutoff=0.5)).strip()
    if not hint:
        hint = "marl_collect.envs.available_envs() lists the installed tasks."
    return UnknownTaskError(f"There is no task {task!r}. {hint}")


def _installed() -> list[str]:
    return [f"{key}/{t}" for key, family in FAMILIES.items() for t in _tasks(family)]


def _import(family: TaskPackage, name: str, task: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            # PettingZoo 1.27 deprecates these modules in favour of a registry, which
            # older versions lack.
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"{family.package}.{name}")
    except ImportError as error:
        lacking = f"the module {error.name}" if error.name else "a package"
        raise MissingPackageError(
            f"{task} needs {lacking}, which cannot be imported ({error}). "
            f'Install the task family: pip install "{family.install}".',
            name=error.name,
        ) from error


def _tasks(family: TaskPackage) -> list[str]:
    # `find_spec` imports the package of a subpackage. That of magent2 sets a number of
    # threads for the user's process.
    package, *inner = family.package.split(".")
    folders = [str(folder.joinpath(*inner)) for folder in folders_of(package)]
    modules = pkgutil.iter_modules(folders)
    return sorted(m.name for m in modules if _VERSIONED.fullmatch(m.name))


def _missing_roms() -> str:
    """Return how to install Atari's ROMs, ``""`` if there are any."""
    folders = folders_of("multi_agent_ale_py")
    patterns = ("*.bin", "roms/*.bin", "ROM/*/*.bin")
    roms = (rom for folder in folders for p in patterns for rom in folder.glob(p))
    return "" if any(roms) else DOWNLOAD_ROMS


def _missing(family: TaskPackage, task: str) -> str:
    needed = list(family.requires)
    for stem, modules in family.extra.items():
        if task.startswith(stem):
            needed += modules
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if not lacking:
        return _missing_roms() if family.package == _ATARI else ""
    return f'{", ".join(lacking)} missing: pip install "{family.install}"'
