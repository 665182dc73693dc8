"""``marl-collect bench``: the benchmark suite of the checkout that is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import typer

import marl_collect
from marl_collect.cli.consoles import user_errors

NEEDS = ("torchrl", "matplotlib", "psutil", "pettingzoo")


def bench(context: typer.Context) -> None:
    """Measure collection against TorchRL, other peers and bare loops.

    Takes the options of `benchmarks/suite.py`: `--quick` for five minutes,
    `--minutes 90`, `--resume`; `--help` shows all of them.
    """
    with user_errors(FileNotFoundError, ImportError):
        command = [sys.executable, str(_suite()), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _suite() -> Path:
    """Return the suite's path.

    Raises:
        FileNotFoundError: if the package is not that of a checkout.
        ImportError: if something that the suite needs is not installed.
    """
    path = Path(marl_collect.__file__).parents[1] / "benchmarks" / "suite.py"
    if not path.exists():
        raise FileNotFoundError(
            "The benchmarks are not installed with the package: run this in a checkout "
            f"that was installed with `pip install -e .` (there is no {path})."
        )
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"The benchmarks need {', '.join(missing)}: pip install -e '.[bench]'."
        )
    return path
