"""Tasks that a library registers with Gymnasium."""

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from marl_collect.envs.common import defaults_of
from marl_collect.errors import imports_of


def is_registered(library: str, task: str) -> bool:
    """Return whether ``library`` registers ``task``; imports the library."""
    importlib.import_module(library)
    spec = gymnasium.registry.get(task)
    return spec is not None and str(spec.entry_point).partition(".")[0] == library


def defaults(library: str, task: str) -> dict[str, Any]:
    """Return the arguments of the environment's class and their values in ``task``."""
    with imports_of(library, task):  # its extra has the library's name
        importlib.import_module(library)
    spec = gymnasium.spec(task)
    assert isinstance(spec.entry_point, str)
    return defaults_of(load_env_creator(spec.entry_point)) | spec.kwargs


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
    assert isinstance(spec.entry_point, str)
    env: Any = load_env_creator(spec.entry_point)(**(spec.kwargs | converted))
    env.spec = spec
    return env


def _member(name: str, default: Any, value: Any) -> Any:
    if not (isinstance(default, Enum) and isinstance(value, str)):
        return value
    members = type(default).__members__
    if value.upper() not in members:
        raise ValueError(
            f"{name} must be one of {', '.join(members).lower()}, but is {value!r}."
        )
    return members[value.upper()]
