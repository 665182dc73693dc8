"""Tasks that a library registers with Gymnasium."""

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from marl_collect.envs.common import defaults_of
from marl_collect.envs.family import Family
from marl_collect.errors import imports_of


def is_registered(library: str, task: str) -> bool:
    """Return whether ``library`` registers ``task``; imports the library."""
    importlib.import_module(library)
    spec = gymnasium.registry.get(task)
    return spec is not None and str(spec.entry_point).partition(".")[0] == library


def require(family: Family, task: Any) -> None:
    """Check the name of a task; one of the user's own may be of any class.

    Raises:
        TypeError: if it is no text.
        UnknownTaskError: if nobody registered such a task; names similar ones.
        MissingPackageError: if a library is missing; names the extra to install.
    """
    if not isinstance(task, str) or task not in gymnasium.registry:
        family.require(task)


def defaults(library: str, task: str) -> dict[str, Any]:
    """Return the arguments of the environment's class and their values in ``task``."""
    with imports_of(library, task):  # its extra has the library's name
        importlib.import_module(library)
    spec = gymnasium.spec(task)
    return defaults_of(_class_of(spec)) | spec.kwargs


def build(library: str, task: str, arguments: Mapping[str, Any]) -> Any:
    """Build ``task`` without the wrappers of ``gymnasium.make``.

    They check values in every step, and take the argument ``max_episode_steps``, which
    the environment itself may have.

    Args:
        library: module that registers the task.
        task: name in Gymnasium's registry.
        arguments: replace the registry's arguments. A member of an enumeration may be
            given by its name.

    Raises:
        ValueError: if an enumeration has no member of a given name.
    """
    default_arguments = defaults(library, task)
    converted = {
        name: _member(name, default_arguments.get(name), value)
        for name, value in arguments.items()
    }
    spec = gymnasium.spec(task)
    env: Any = _class_of(spec)(**(spec.kwargs | converted))
    env.spec = spec
    return env


def _class_of(spec: EnvSpec) -> Any:
    entry: Any = spec.entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def _member(name: str, default: Any, value: Any) -> Any:
    if not (isinstance(default, Enum) and isinstance(value, str)):
        return value
    members = type(default).__members__
    if value.upper() not in members:
        raise ValueError(
            f"{name} must be one of {', '.join(members).lower()}, but is {value!r}."
        )
    return members[value.upper()]
