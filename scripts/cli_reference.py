"""Write docs/cli.md, the reference of the command line, from the commands themselves.

Run without arguments to write the page; this takes a minute, because the example of
each command runs. With ``--check`` the page is only compared, without running the
examples: tests/test_first_hour.py runs them.
"""

import contextlib
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import click
import typer
from generated import update
from typer.testing import CliRunner

from marl_collect.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

_HEAD = """# Command line

All commands and their arguments.
`python scripts/cli_reference.py` generates this page.

`marl-collect --install-completion` installs shell completion;
`marl-collect --show-completion` prints the script instead. Errors go to stderr.
The exit code is 0 on success, 1 on failure, 2 for an invalid argument, and 130
after Ctrl-C. The example output below was redirected to a file at 80 columns; a
terminal also shows colours and live progress.
"""

EXAMPLES = {
    "envs": "envs simple",
    "info": "info simple_spread_v3",
    "collect": (
        "collect simple_spread_v3 --episodes 5 --policy random --seed 0 --out data"
    ),
    "inspect": "inspect data",
    "view": "view data --save best.html --episode 0",
    "copy": "copy data copied",
    "export": "export data --format minari --out spread-v0",
    "play": "play simple_spread_v3 --episodes 3",
    "render": "render simple_spread_v3 --out spread.gif --max-frames-per-traj 10",
    "compare": (
        "compare simple_spread_v3 --setup ippo-local-shared --setup mappo-local-own "
        "--frames 400 --seeds 2 --workers 1 --jobs 1 --set frames_per_batch=200 "
        "--set eval_interval=200 --set eval_episodes=4 --set final_episodes=4 "
        "--out spread"
    ),
}
"""An example of each command but ``import``, which needs a vault. They run in this
order, in one empty folder."""
_ENVIRONMENT = {"COLUMNS": "80", "MINARI_DATASETS_PATH": "minari"}


def run_examples() -> dict[str, str]:
    """Run every example at 80 columns; return what each prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return {name: run_example(name) for name in EXAMPLES}


def run_example(name: str) -> str:
    """Run the example of a command in the current folder; return what it prints.

    Raises:
        SystemExit: if it fails.
    """
    command = EXAMPLES[name]
    arguments = shlex.split(command)
    result = CliRunner().invoke(app, arguments, env=_ENVIRONMENT)
    code, text = result.exit_code, result.output
    if code:
        message = f"`marl-collect {command}` failed:\n{text}"
        raise SystemExit(message) from result.exception
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def shown(page: str) -> dict[str, str]:
    """Return what each example prints according to the page."""
    outputs = re.findall(
        r"^## (\w+)\n(?:(?!## ).*\n)*?Output:\n\n```text\n((?:.*\n)*?)```$",
        page,
        re.MULTILINE,
    )
    return {name: text.rstrip("\n") for name, text in outputs}


def page(outputs: dict[str, str]) -> str:
    """Return the page, with what each example prints."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    sections = [_HEAD, _overview(group.commands)]
    sections += [
        _section(name, command) + _example(name, outputs)
        for name, command in group.commands.items()
    ]
    return "\n".join(sections)


def _example(name: str, outputs: Mapping[str, str]) -> str:
    if name not in EXAMPLES:
        return ""
    command = "\n".join(
        textwrap.wrap(
            EXAMPLES[name],
            80,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ).replace("\n", " \\\n")
    text = outputs.get(name, "")
    return f"\n```sh\nmarl-collect {command}\n```\n\nOutput:\n\n```text\n{text}\n```\n"


def _overview(commands: dict[str, click.Command]) -> str:
    lines = ["| command | what it does |", "|---|---|"]
    for name, command in commands.items():
        first = _paragraphs(command.help)[0]
        lines.append(f"| [`{name}`](#{name}) | {first} |")
    return "\n".join([*lines, ""])


def _section(name: str, command: click.Command) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(
        str(p.name).upper() if p.required else f"[{str(p.name).upper()}]"
        for p in arguments
    )
    lines = [
        f"## {name}",
        "",
        f"```text\nmarl-collect {name} {usage} [OPTIONS]\n```",
        "",
    ]
    lines += ["\n\n".join(_paragraphs(command.help)), ""]
    if arguments or options:
        lines += ["| argument | default | meaning |", "|---|---|---|"]
        lines += [_row(f"`{str(p.name).upper()}`", p) for p in arguments]
        lines += [_row(_names(p), p) for p in options if p.name != "help"]
        lines += [""]
    return "\n".join(lines)


def _names(option: click.Parameter) -> str:
    return ", ".join(f"`{n}`" for n in [*option.opts, *option.secondary_opts])


def _row(name: str, parameter: click.Parameter) -> str:
    text = str(getattr(parameter, "help", "") or "").strip()
    default = parameter.default
    default_text = (
        "" if default in (None, (), [], "") or callable(default) else f"`{default}`"
    )
    if match := re.search(r"\s*\[default: (.*)\]$", text):
        default_text, text = match[1], text[: match.start()]
    return f"| {name} | {default_text} | {text} |"


def _paragraphs(text: str | None) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return [" ".join(paragraph.split()) for paragraph in paragraphs]


def main() -> int:
    """Write or compare the page; 1 if there was a difference."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    outputs = shown(before) if "--check" in sys.argv else run_examples()
    return update({PAGE: page(outputs)}, "python scripts/cli_reference.py")


if __name__ == "__main__":
    sys.exit(main())
