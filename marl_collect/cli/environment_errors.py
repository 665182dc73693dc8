"""Reports errors of an environment without the command's own traceback."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from marl_collect.cli.consoles import USER_ERROR, fail
from marl_collect.cli.tasks import is_own, task_settings
from marl_collect.errors import worker_error_of


@contextmanager
def environment_errors(task: str, env_kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Print errors of building the environment of ``task`` and end the command.

    Args:
        task: name of the task.
        env_kwargs: the user's keyword arguments.
    """
    try:
        yield
    except Exception as error:
        raise fail(explain(error, task, env_kwargs), USER_ERROR) from error


def explain(error: Exception, task: str, env_kwargs: Mapping[str, Any]) -> str:
    """Return what to print about an error of a worker or of the user's input.

    The worker's traceback is included if it helps: if the environment is the user's
    own code, or if it failed after it was built. After an error about keyword
    arguments, the settings of the task follow.
    """
    worker = worker_error_of(error)
    suffices = isinstance(error, (ValueError, ImportError, OSError))
    text = str(error) if suffices else f"{type(error).__name__}: {error}"
    if worker is error:
        text = str(error)
    elif worker is not None and (worker.phase != "create" or is_own(task)):
        text = f"{type(error).__name__}: {error}\n{worker}"
    if isinstance(error, (TypeError, ValueError)) and env_kwargs:
        text += _settings_hint(task, env_kwargs)
    return text


def _settings_hint(task: str, env_kwargs: Mapping[str, Any]) -> str:
    options = " ".join(f"--env {name}={value}" for name, value in env_kwargs.items())
    known = task_settings(task)
    if not known:
        return f"\nThe environment was given {options}."
    listed = ", ".join(f"{name}={default!r}" for name, default in known.items())
    texts = "".join(
        f" {name} is the text {value!r}, its default {known[name]} is a number."
        for name, value in env_kwargs.items()
        if isinstance(value, str) and isinstance(known.get(name), (int, float))
    )
    return (
        f"\nThe environment was given {options}.{texts} Settings of {task}: {listed}."
    )
