"""Runs commands of the package in this process, where they start faster."""

import re

from typer.testing import CliRunner

from marl_collect.cli.main import app


def run(*arguments: object) -> tuple[int, str]:
    """Return a command's exit code, and its words, without the lines of tables."""
    words = list(map(str, arguments))
    result = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    text = re.sub(r"[\s│]+", " ", result.stdout + result.stderr)
    return result.exit_code, text


def output_of(*arguments: object) -> str:
    """Run a command that succeeds; return its words."""
    code, text = run(*arguments)
    assert code == 0, text
    return text


def error_of(*arguments: object) -> str:
    """Run a command that is refused; return its words."""
    code, text = run(*arguments)
    assert code == 2, text
    assert "Traceback" not in text
    return text
