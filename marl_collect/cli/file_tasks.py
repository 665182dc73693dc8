"""What a file says of a task is used only where it cannot lead to code.

Run folders and datasets may come from anybody, and they name a task and its settings.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from marl_collect.cli.tasks import find_provider, is_own
from marl_collect.programs.task_providers import TaskProvider


class UntrustedTaskError(ValueError):
    """A file names a task, or settings, that only the user may choose."""


def checked_task(
    source: str,
    task: Any,
    settings: Any,
    typed: Mapping[str, Any],
    *,
    typed_task: str | None = None,
    how: Callable[[str], str],
) -> tuple[str, dict[str, Any]]:
    """Return the task and the settings of a file, and what the user has typed.

    Args:
        source: of the task, for errors.
        task: that the file names.
        settings: keyword arguments of its environment in the file.
        typed: settings that the user has typed; they replace those of the file.
        typed_task: that the user has typed; replaces the file's.
        how: returns what to do to use a task of the file, such as ``"add --task a:b"``.

    Raises:
        UntrustedTaskError: if the file chooses code (``"module:name"``), or a setting
            that the task's family does not declare safe; says what to type.
        ValueError: if the file is damaged, or no provider knows the task.
        ImportError: if a package is missing; says what to install.
    """
    if not (isinstance(task, str) and isinstance(settings, dict)):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument
            f"{source} is damaged: expected the name and the settings of a task, but "
            f"found {task!r} and {settings!r}."
        )
    unchecked = {name: v for name, v in settings.items() if name not in typed}
    if typed_task is None and is_own(task):
        raise UntrustedTaskError(
            f"{source} names the task {task}, which is code outside the registered "
            f"families. If you trust it, {how(shlex.quote(task))}{_options(unchecked)}."
        )
    chosen = task if typed_task is None else typed_task
    unsafe: dict[str, None] = {}
    if unchecked:
        provider = find_provider(chosen)
        for name, value in unchecked.items():
            unsafe |= dict.fromkeys(_unsafe(provider, chosen, name, value))
    if unsafe:
        refused = {n: v for n, v in unchecked.items() if _leads_to(n, unsafe)}
        raise UntrustedTaskError(
            f"{source} has settings for {chosen} that may lead to files or code: "
            f"{', '.join(unsafe)}. If you trust them, add{_options(refused)}. A value "
            "of your own replaces the file's."
        )
    return chosen, settings | dict(typed)


def _unsafe(provider: TaskProvider, task: str, name: str, value: Any) -> Iterator[str]:
    """Yield the settings, or entries of a setting, that are not declared safe."""
    is_safe = getattr(provider, "is_safe", None)
    if is_safe is not None and is_safe(task, name, value):
        return
    if not isinstance(value, dict):
        yield name
        return
    for key, inner in value.items():
        yield from _unsafe(provider, task, f"{name}.{key}", inner)


def _leads_to(name: str, unsafe: Mapping[str, None]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for path in unsafe)


def _options(settings: Mapping[str, Any]) -> str:
    """Return what to type for these settings, with a space before it."""
    texts = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return "".join(f" --env {shlex.quote(text)}" for text in texts)
