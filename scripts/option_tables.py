"""Write the tables of options in the documentation from their declarations.

A page has the place of a table between two comments, which name a class of options, or
a table of rejected keywords::

    <!-- options: marl_collect.collectors.options.BatchOptions -->
    <!-- end of options -->

A place ``<!-- options by subject -->`` gets all options of the collectors, with types,
in sections.

With ``--check`` the pages are compared only.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from generated import update

from marl_collect.collectors.options import CollectorOptions
from marl_collect.options import Declared, declared, type_words

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
    tables = _of_declaration(match["name"]) if match["name"] else _by_subject()
    return f"{match[1]}\n{tables}\n\n{match[3]}"


def _of_declaration(path: str) -> str:
    """Return the table of what a class of options itself declares, or of advice."""
    module, _, name = path.rpartition(".")
    declaration = getattr(import_module(module), name)
    if isinstance(declaration, Mapping):
        advice = [[name, keyword.advice] for name, keyword in declaration.items()]
        return _table("TorchRL | here", advice)
    rows = [
        [option.name, _shown(option.default), option.option.help]
        for option in declared(declaration)
        if option.name in declaration.__annotations__
    ]
    return _table("argument | default | meaning", rows)


def _by_subject() -> str:
    """Return a section for every subject, with a table of its options."""
    unlisted = {option.name: option for option in declared(CollectorOptions)}
    sections = {
        subject: [_row(unlisted.pop(name)) for name in names.split()]
        for subject, names in SUBJECTS.items()
    }
    if unlisted:
        sections["Further"] = [_row(option) for option in unlisted.values()]
    head = "argument | type | default | meaning"
    return "\n\n".join(f"## {s}\n\n{_table(head, r)}" for s, r in sections.items())


def _row(option: Declared) -> list[str]:
    text = option.option.help
    if excluded := ", ".join(f"`{collector}`" for collector in option.option.not_in):
        text += f". Not for {excluded}"
    kind = "any" if option.kind is Any else type_words(option).replace("|", r"\|")
    return [option.name, kind, _shown(option.default), text]


def _table(head: str, rows: Iterable[list[str]]) -> str:
    """Return a table whose rows begin with a name."""
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines])


def _shown(default: Any) -> str:
    if default is MISSING:
        return ""
    if isinstance(default, Enum):
        return default.name
    return f"`{default!r}`"


if __name__ == "__main__":
    sys.exit(main())
