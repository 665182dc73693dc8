"""All built-in families as one provider, for installations with the old entry point.

Each family registers its own provider since; delete this file after reinstalling the
package (``pip install -e .``) wherever it was installed before.
"""

from collections.abc import Callable
from typing import Any

from marl_collect.envs.errors import UnknownTaskError
from marl_collect.envs.lab2d import provider as lab2d
from marl_collect.envs.meltingpot import provider as meltingpot
from marl_collect.envs.pettingzoo import provider as pettingzoo

_PROVIDERS: tuple[Any, ...] = (pettingzoo, meltingpot, lab2d)


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions determine what environments do."""
    return tuple(name for provider in _PROVIDERS for name in provider.packages())


def available_tasks() -> dict[str, str]:
    """Return each task's name, and what is missing to build it."""
    return {
        task: missing
        for provider in _PROVIDERS
        for task, missing in provider.available_tasks().items()
    }


def find_task(task: str) -> Callable[..., Any]:
    """Return what builds the environment of ``task``."""
    return _find(task)[1]


def picture_settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments with which ``render()`` returns images."""
    provider = _find(task)[0]
    settings: dict[str, Any] = (
        provider.picture_settings(task) if provider is pettingzoo else {}
    )
    return settings


def _find(task: str) -> tuple[Any, Callable[..., Any]]:
    hints: list[str] = []
    for provider in _PROVIDERS:
        try:
            return provider, provider.find_task(task)
        except UnknownTaskError as error:
            hints.append(str(error))
    raise UnknownTaskError(" ".join(filter(None, hints)))
