"""The command, its version and its subcommands."""

import os
from typing import Annotated

import typer

import marl_collect
from marl_collect.cli.collect import collect
from marl_collect.cli.compare import compare
from marl_collect.cli.consoles import USER_ERROR, fail
from marl_collect.cli.datasets import copy, export, import_, inspect
from marl_collect.cli.listing import envs, info
from marl_collect.cli.play import play
from marl_collect.cli.render import render
from marl_collect.cli.view import view
from marl_collect.errors import MissingPackageError

app = typer.Typer(
    name="marl-collect",
    help="Collect multi-agent experience, look at it and train on it.",
    epilog="Errors go to stderr. The exit code is 0 on success, 1 on failure, 2 for an "
    "invalid argument, and 130 after Ctrl-C.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (collect, compare, play, render, inspect, view, copy, export):
    app.command()(_command)
app.command("import")(import_)
app.command()(envs)
app.command()(info)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's callback
    if value:
        typer.echo(f"marl-collect {marl_collect.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    del version  # Its callback has printed it.
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


_QUIET = {
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "RL_LOGGING_LEVEL": "WARNING",  # TorchRL logs every storage that it creates.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Environment variables that keep libraries from printing; workers inherit them."""


def main() -> None:
    """Run the command; the entry point of ``marl-collect``."""
    try:
        app()
    except MissingPackageError as error:
        raise SystemExit(fail(str(error), USER_ERROR).exit_code) from None


if __name__ == "__main__":
    main()
