"""Test every task and write docs/tasks.md.

Builds each task and runs ``check_env`` for a few steps. The table describes the task
and says whether it passed.

    python scripts/environments.py               # every family: minutes
    python scripts/environments.py sisl mpe      # only these; other rows are kept
"""

import argparse
import os
import re
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

from gymnasium import spaces

from marl_collect.cli.tasks import available_tasks, find_factory
from marl_collect.core.description import EnvDescription
from marl_collect.testing.check_env import check_env

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tasks.md"

_HEAD = (
    "| task | agents act | agents per group | observation | action | result |\n"
    "|---|---|---|---|---|---|\n"
)

_NAMED = 30  # Maximum number of tasks listed by name.
_LONGEST = 160  # Maximum length of a reason, in characters.


def row(task: str) -> str:
    """Return the line of ``task``."""
    try:
        builder = find_factory(task, {})
        env = builder()
        description = env.description
        # In an AEC environment one agent acts in a frame.
        turns = not getattr(env, "is_parallel", True)
        env.close()
        check_env(builder, episodes=1, steps=6)
    except Exception as error:  # noqa: BLE001 - the reason is what the table is for
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"| {task} | | | | | {reason[:_LONGEST]} |".replace("||", "| |")
    order = "in turn" if turns else "simultaneously"
    by_group = (_by_group(description, name) for name in ("observation", "action"))
    name = task.replace("|", r"\|")
    cells = (name, order, _agents(description), *by_group, "passes")
    return f"| {' | '.join(cells)} |"


def _agents(description: EnvDescription) -> str:
    groups = description.groups.items()
    if len(groups) > 4:
        return f"{len(groups)} groups with one agent each"
    return ", ".join(f"{name}: {group.n_agents}" for name, group in groups)


def _by_group(description: EnvDescription, name: str) -> str:
    texts = {}
    for group, about in description.groups.items():
        masked = " masked" if name == "action" and about.action_mask else ""
        texts[group] = _space(getattr(about, name)) + masked
    if len(set(texts.values())) == 1:
        return texts.popitem()[1]
    return "; ".join(f"{group}: {text}" for group, text in texts.items())


def _space(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{k}: {_space(s)}" for k, s in space.spaces.items())
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})"
    shape = ", ".join(map(str, space.shape or ()))
    return f"{space.dtype} [{shape}]"


def _note(command: str, tasks: list[str]) -> str:
    """Return a sentence about tasks that could not be tested."""
    names = ", ".join(task.split("/")[1] for task in tasks[:_NAMED])
    remainder = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
    return f"Not tested because they need `{command}`: {names}{remainder}.\n"


def main() -> None:
    """Write the rows of the named families, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    chosen_families = parser.parse_args().families
    warnings.simplefilter("ignore")
    families: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
    for task, command in available_tasks().items():
        family = task.split("/")[0]
        if chosen_families and family not in chosen_families:
            continue
        lines, absent = families.setdefault(family, ([], {}))
        if command:  # That installs what the task needs.
            absent.setdefault(command, []).append(task)
        else:
            lines.append(row(task))
            print(lines[-1], flush=True)
    for family, (lines, absent) in families.items():
        text = PAGE.read_text()
        begin, end = f"<!-- begin {family} -->\n", f"<!-- end {family} -->"
        table = _HEAD + "\n".join(lines) + "\n" if lines else ""
        notes = [_note(*task_note) for task_note in absent.items()]
        block = begin + "\n".join([table, *notes]) + end
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        new_text, count = re.subn(pattern, lambda _, b=block: b, text, flags=re.S)  # type: ignore[misc]
        PAGE.write_text(new_text if count else f"{text}\n## {family}\n\n{block}\n")


if __name__ == "__main__":
    main()
