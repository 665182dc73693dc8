"""Write docs/cli.md, the reference of the command line, from the commands themselves.

Run without arguments to write the page; with ``--check`` to compare only.
"""

import re
import sys
from pathlib import Path

import click
import typer

from marl_collect.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

_HEAD = """# Command line

For everyone who works in a terminal: every command with all of its arguments.
`python scripts/cli_reference.py` writes this page from the commands.

`marl-collect --install-completion` adds completion of commands and options to your
shell; `marl-collect --show-completion` prints the script instead. Errors go to stderr.
The exit code is 0 after success, 1 after a failure, 2 for a wrong argument, and 130
after Ctrl-C.
"""


def page() -> str:
    """Return the page."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    parts = [_HEAD, _overview(group.commands)]
    parts += [_section(name, command) for name, command in group.commands.items()]
    return "\n".join(parts)


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
    shown = "" if default in (None, (), [], "") or callable(default) else f"`{default}`"
    if match := re.search(r"\s*\[default: (.*)\]$", text):
        shown, text = match[1], text[: match.start()]
    return f"| {name} | {shown} | {text} |"


def _paragraphs(text: str | None) -> list[str]:
    parts = re.split(r"\n\s*\n", (text or "").strip())
    return [" ".join(part.split()) for part in parts]


def main() -> int:
    """Write or compare the page; 1 if there was a difference."""
    written = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == written:
        return 0
    if "--check" in sys.argv:
        print("docs/cli.md differs from the commands: run scripts/cli_reference.py.")
    else:
        PAGE.write_text(written, encoding="utf-8")
    return 1


if __name__ == "__main__":
    sys.exit(main())
