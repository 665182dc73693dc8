"""``marl-collect bench``: runs the benchmark suite of an installed checkout."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import typer

import marl_collect
from marl_collect.cli.consoles import user_errors
from marl_collect.cli.tasks import available_tasks

NEEDS = ("torchrl", "matplotlib", "psutil")


def bench(context: typer.Context) -> None:
    """Compare collection speed with TorchRL, other libraries and bare loops.

    Accepts the options of `benchmarks/suite.py`, such as `--quick` (five minutes),
    `--minutes 90` and `--resume`. `--help` lists all of them.
    """
    with user_errors(FileNotFoundError, ImportError, ValueError):
        command = [sys.executable, str(_suite()), *context.args]
        environment = os.environ | {"MARL_COLLECT_COMMAND": "marl-collect bench"}
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)


def _suite() -> Path:
    """Return the path of the suite.

    Raises:
        FileNotFoundError: if the package was not installed from a checkout.
        ImportError: if a library is missing, or all families of environments are.
    """
    path = Path(marl_collect.__file__).parents[1] / "benchmarks" / "suite.py"
    if not path.exists():
        raise FileNotFoundError(
            f"Expected the benchmark suite at {path}, but there is no such file. "
            "Benchmarks are part of a checkout: install one with `pip install -e .`."
        )
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if all(available_tasks().values()):
        missing.append("an environment library")
    if missing:
        raise ImportError(
            f"The benchmarks need {', '.join(missing)}: pip install -e '.[bench]'."
        )
    return path
