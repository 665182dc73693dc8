"""Write the tables of options in the documentation from their declarations.

A page has the place of a table between two comments, which name a class of options, or
a table of rejected keywords::

    <!-- options: marl_collect.collectors.options.BatchOptions -->
    <!-- end of options -->

A place ``<!-- options by subject -->`` gets all options of the collectors, with types,
in sections.

Run without arguments to write them all; with ``--check`` to compare only.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from generated import update

from marl_collect.collectors.options import CollectorOptions
from marl_collect.options import Declared, RejectedKeyword, declared, type_words

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(
    r"(<!-- options(?:: (?P<name>[\w.]+)| by subject) -->\n)"
    r".*?(<!-- end of options -->\n)",
    re.DOTALL,
)
SUBJECTS = {
    "What to collect with": """create_env_fn policy policies assign policy_factory
        create_env_kwargs init_fn""",
    "Size": """frames_per_batch total_frames num_workers envs_per_worker
        max_frames_per_traj trajs_per_batch""",
    "Episodes and exploration": """seed exploration_type init_random_frames
        reset_at_each_iter set_truncated check_actions curriculum level""",
    "Several collectors": "rank world_size worker_idx",
    "What a batch contains, and its shape": """track_traj_ids track_policy_version
        compact_obs split_trajs traj_format cat_results postproc use_buffers""",
    "Weights": """update_at_each_batch weight_sync_schemes weight_recv_schemes""",
    "Devices and compilation": """device policy_device storing_device no_cuda_sync
        compile_policy cudagraph_policy trust_policy""",
    "Speed": "prefetch preemptive_threshold max_staleness",
    "Replay": "replay_buffer",
    "Faults": "on_worker_failure timeout start_timeout max_worker_rss",
    "Processes and threads": """start_method preload num_sub_threads num_threads""",
}
"""Sections of the page of all options. An option in none of them is in the last one."""


def main() -> int:
    """Write or compare the tables of all pages; 1 if there was a difference."""
    pages = {
        page: PLACE.sub(_written, page.read_text(encoding="utf-8"))
        for page in sorted(DOCS.rglob("*.md"))
    }
    return update(pages, "python scripts/option_tables.py")


def _written(match: re.Match[str]) -> str:
    if match["name"] is None:
        return f"{match[1]}\n{_by_subject()}\n\n{match[3]}"
    module, _, name = match["name"].rpartition(".")
    declaration = getattr(import_module(module), name)
    table_of = _rejected if isinstance(declaration, Mapping) else _options
    table = table_of(declaration)
    return f"{match[1]}\n{table}\n\n{match[3]}"


def _options(kind: Any) -> str:
    """Return the table of what a class of options itself declares."""
    lines = ["| argument | default | meaning |", "|---|---|---|"]
    for name, _, default, option in declared(kind):
        if name in kind.__annotations__:
            lines.append(f"| `{name}` | {_shown(default)} | {option.help} |")
    return "\n".join(lines)


def _by_subject() -> str:
    """Return a section for every subject, with a table of its options."""
    options_by_name = {option.name: option for option in declared(CollectorOptions)}
    subjects = {subject: names.split() for subject, names in SUBJECTS.items()}
    listed_names = {name for names in subjects.values() for name in names}
    if unknown_names := sorted(listed_names - options_by_name.keys()):
        raise SystemExit(f"There are no options {unknown_names}.")
    unlisted = [name for name in options_by_name if name not in listed_names]
    sections = []
    for subject, names in (subjects | {"Further": unlisted}).items():
        if names:
            lines = ["| argument | type | default | meaning |", "|---|---|---|---|"]
            lines += [_line(options_by_name[name]) for name in names]
            sections.append(f"## {subject}\n\n" + "\n".join(lines))
    return "\n\n".join(sections)


def _line(option: Declared) -> str:
    text = option.option.help
    if excluded := ", ".join(f"`{collector}`" for collector in option.option.not_in):
        text += f". Not for {excluded}"
    kind = "any" if option.kind is Any else type_words(option).replace("|", r"\|")
    return f"| `{option.name}` | {kind} | {_shown(option.default)} | {text} |"


def _rejected(keywords: Mapping[str, RejectedKeyword]) -> str:
    lines = [f"| `{name}` | {keyword.advice} |" for name, keyword in keywords.items()]
    return "\n".join(["| TorchRL | here |", "|---|---|", *lines])


def _shown(default: Any) -> str:
    if default is MISSING:
        return ""
    if isinstance(default, Enum):
        return default.name
    return f"`{default!r}`"


if __name__ == "__main__":
    sys.exit(main())
