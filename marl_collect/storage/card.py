"""What a dataset holds, as tables, and its card: these and how to load it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, stored_action
from marl_collect.programs.printable import markdown_row

if TYPE_CHECKING:  # They import pyarrow, and `marl-collect info` needs none.
    from marl_collect.storage.frames import Transitions
    from marl_collect.storage.trajectories import Trajectories

Table = tuple[str, Sequence[str], list[tuple[str, ...]]]
"""Title, names of the columns, and rows."""
NUMBERS: Final = ("mean", "std", "lowest", "highest", "NaN")
"""Columns of numbers."""

_LOADING = """\
```python
from marl_collect import open_dataset

dataset = open_dataset("data")  # the folder
batch = dataset.transitions.sample(256)  # TensorDict [256]
episodes = dataset.trajectories.sample(8)  # [8, longest], ("collector", "mask")
for batch in dataset.transitions.loader(batch_size=256, seed=0):  # one epoch
    ...
```
"""


def card(frames: "Transitions", episodes: "Trajectories") -> str:
    """Return the card of a dataset as Markdown."""
    about = frames.description
    summary = (
        f"Multi-agent experience in the environment `{about.task}`, collected with "
        f"marl_collect: {len(frames):,} frames, {len(episodes):,} complete "
        f"episodes, {frames.nbytes / 1e6:,.1f} MB in memory. Shapes are those of one "
        "frame. Ranges are over all valid frames and agents, the zeros of dead agents "
        "included."
    )
    settings = f"Settings: {dict(about.env_kwargs) or 'the defaults'}."
    sections = [f"# {about.task}", summary, settings]
    for title, columns, rows in card_tables(frames, episodes):
        named = ((f"`{name}`", *cells) for name, *cells in rows)
        lines = map(markdown_row, (columns, ["---"] * len(columns), *named))
        sections += [f"## {title}", "\n".join(lines) if rows else "None."]
    return "\n\n".join([*sections, "## Loading", _LOADING])


def card_tables(frames: "Transitions", episodes: "Trajectories") -> Iterator[Table]:
    """Yield groups, summaries of the episodes, keys and runs."""
    yield groups_table(frames.description.environment)
    yield episodes_table(episodes)
    yield _keys_table(frames)
    yield _runs_table(frames)


def _number(value: float | None) -> str:
    """Return a number with at most five digits; integers are whole."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def groups_table(environment: EnvDescription) -> Table:
    """Return the agents of each group, and the spaces of one agent."""
    rows = []
    for name, group in environment.groups.items():
        agents = f"{group.n_agents}: {', '.join(group.agents)}"
        own = map(describe_space, (group.observation, stored_action(group)))
        rows.append((name, agents, *own))
    return "Groups", ("group", "agents", "observation", "action"), rows


def episodes_table(episodes: "Trajectories") -> Table:
    """Return the returns of the team and of each agent, and lengths."""
    groups = episodes.description.environment.groups
    values = [("all", "team sum", episodes.returns)]
    for name, returns in episodes.agent_returns.items():
        agents = zip(groups[name].agents, returns.T, strict=True)
        values += ((name, agent, of_agent) for agent, of_agent in agents)
    values.append(("all", "length", episodes.lengths.astype(float)))
    rows: list[tuple[str, ...]] = []
    for *names, of_all in values if len(episodes) else []:
        numbers = (f(of_all) for f in (np.mean, np.std, np.min, np.max))
        rows.append((*names, *(_number(float(number)) for number in numbers)))
    return "Complete episodes", ("group", "agent", *NUMBERS[:4]), rows


def _keys_table(frames: "Transitions") -> Table:
    """Return shape and dtype of the keys, and the range of their values."""
    ranges = frames.ranges()
    rows = [
        (
            repr(column.key[0] if len(column.key) == 1 else column.key),
            str(list(column.shape)),
            column.dtype,
            *map(_number, vars(ranges[column.key]).values()),
        )
        for column in frames.keys
    ]
    return "Keys", ("key", "shape", "dtype", *NUMBERS[2:]), rows


def describe_space(space: spaces.Space[Any]) -> str:
    """Return a short text for a space; a Box shows its lowest and highest bound."""
    if isinstance(space, spaces.Dict):
        inner = (f"{name}: {describe_space(s)}" for name, s in space.spaces.items())
        return "\n".join(inner)
    if isinstance(space, spaces.Box):
        text = f"Box {list(space.shape)} {space.dtype}"
        if not space.low.size:
            return text
        return f"{text} in [{space.low.min():g}, {space.high.max():g}]"
    return str(space)


def _runs_table(frames: "Transitions") -> Table:
    """Return how each run was collected, with the versions that it changed."""
    rows: list[tuple[str, ...]] = []
    before: Mapping[str, str] = {}
    counts = frames.cache.state.runs.values()
    for number, (run, count) in enumerate(zip(frames.runs, counts, strict=True)):
        new = {k: v for k, v in run.versions.items() if before.get(k) != v}
        before = run.versions
        facts = {"policy": run.policy, "options": run.options, "new versions": new}
        about = "\n".join(f"{k}: {_pairs(v)}" for k, v in facts.items() if v)
        rows.append((str(number), f"{count:,}", str(run.seed), run.started, about))
    return "Runs", ("run", "frames", "seed", "started", "about"), rows


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items() if v is not None)
