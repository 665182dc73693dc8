"""The card of a dataset: what it holds and how to load it, as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, stored_action
from marl_collect.storage.description import RunDescription

if TYPE_CHECKING:  # They import pyarrow, and `marl-collect info` needs none.
    from marl_collect.storage.frames import Transitions
    from marl_collect.storage.trajectories import Trajectories

_LOADING = """
```python
from marl_collect import open_dataset

dataset = open_dataset("data")  # the folder
batch = dataset.transitions.sample(256)  # TensorDict [256]
episodes = dataset.trajectories.sample(8)  # [8, longest], ("collector", "mask")
for batch in dataset.transitions.loader(batch_size=256, seed=0):  # one epoch
    ...
```
"""

SUMMARY: Final = ("mean", "std", "lowest", "highest")
"""What is said about numbers of episodes."""
GROUP_COLUMNS: Final = ("group", "agents", "observation", "action")

_ABOUT_KEYS = (
    "Shapes are those of one frame. Ranges are over all valid frames and agents, the "
    "zeros of dead agents included."
)


def card(frames: "Transitions", episodes: "Trajectories") -> str:
    """Return the card of a dataset as Markdown."""
    about = frames.description
    summary = (
        f"Multi-agent experience in the environment `{about.task}`, collected with "
        f"marl_collect: {len(frames):,} frames, {len(episodes):,} complete "
        f"episodes, {frames.nbytes / 1e6:,.1f} MB in memory."
    )
    sections = [
        f"# {about.task}",
        summary,
        "## Environment",
        f"Settings: {dict(about.env_kwargs) or 'the defaults'}.",
        _table(GROUP_COLUMNS, group_rows(about.environment)),
        "## Statistics",
        _episodes(episodes),
        "## Keys",
        _ABOUT_KEYS,
        _keys(frames),
        "## Runs",
        _runs(frames),
        "## Loading",
        _LOADING.strip(),
    ]
    return "\n\n".join(sections) + "\n"


def number(value: float | None) -> str:
    """Return a number with at most five digits; integers are whole."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def group_rows(environment: EnvDescription) -> Iterator[tuple[str, ...]]:
    """Yield the texts of ``GROUP_COLUMNS`` for each group."""
    for name, group in environment.groups.items():
        agents = f"{group.n_agents}: {', '.join(group.agents)}"
        observation = describe_space(group.observation)
        yield name, agents, observation, describe_space(stored_action(group))


def _episodes(episodes: "Trajectories") -> str:
    if not len(episodes):
        return "No episode is complete."
    rows = (
        (group, agent, *map(number, numbers))
        for group, agent, *numbers in summaries(episodes)
    )
    return _table(("group", "agent", *SUMMARY), rows)


def summaries(episodes: "Trajectories") -> Iterator[tuple[Any, ...]]:
    """Yield ``SUMMARY`` of the returns of the team and of each agent, and of lengths.

    With the names of a group and an agent. There is at least one episode.
    """
    groups = episodes.description.environment.groups
    columns: list[Any] = [("all", "team sum", episodes.returns)]
    for name, returns in episodes.agent_returns.items():
        agents = zip(groups[name].agents, returns.T, strict=True)
        columns += ((name, agent, values) for agent, values in agents)
    columns.append(("all", "length", episodes.lengths))
    for *names, values in columns:
        yield (*names, *(float(f(values)) for f in (np.mean, np.std, np.min, np.max)))


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


def _keys(frames: "Transitions") -> str:
    ranges = frames.ranges()
    rows = (
        (
            f"`{field.key[0] if len(field.key) == 1 else field.key!r}`",
            str(list(field.shape)),
            field.dtype,
            *map(number, vars(ranges[field.key]).values()),
        )
        for field in frames.keys
    )
    return _table(("key", "shape", "dtype", "lowest", "highest", "NaN"), rows)


def _runs(frames: "Transitions") -> str:
    counts = frames.cache.state.runs.values()
    runs = zip(frames.runs, counts, new_versions(frames.runs), strict=True)
    rows = (
        (
            str(number),
            f"{count:,}",
            str(run.seed),
            run.started,
            ", ".join(f"{k}={v}" for k, v in run.policy.items()),
            ", ".join(f"{k}={v}" for k, v in run.options.items() if v is not None),
            versions,
        )
        for number, (run, count, versions) in enumerate(runs)
    )
    columns = ("run", "frames", "seed", "started", "policy", "options", "new versions")
    return _table(columns, rows)


def new_versions(runs: Sequence[RunDescription]) -> list[str]:
    """Return for each run the versions that differ from those of the run before."""
    before: Mapping[str, str] = {}
    texts = []
    for run in runs:
        new = (f"{k} {v}" for k, v in run.versions.items() if before.get(k) != v)
        texts.append(", ".join(new))
        before = run.versions
    return texts


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
