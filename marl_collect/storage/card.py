"""The card of a dataset: what it holds and how to load it, as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gymnasium import spaces

from marl_collect.core.description import EnvDescription, Key, stored_action
from marl_collect.storage.description import RunDescription
from marl_collect.storage.statistics import Range, Statistics

if TYPE_CHECKING:  # It imports pyarrow, and `marl-collect info` needs none.
    from marl_collect.storage.frames import Transitions

_LOADING = """
```python
from marl_collect import open_dataset

dataset = open_dataset("data")  # the folder
batch = dataset.transitions.sample(256)  # TensorDict [256]
episodes = dataset.trajectories.sample(8)  # [8, longest], ("collector", "mask")
for batch in dataset.loader(batch_size=256, seed=0):  # one epoch
    ...
```
"""

GROUP_COLUMNS: Final = ("group", "agents", "observation", "action")

_ABOUT_KEYS = (
    "Shapes are those of one frame. Ranges are over all valid frames and agents, the "
    "zeros of dead agents included."
)


def card(frames: "Transitions", statistics: Statistics) -> str:
    """Return the card of a dataset as Markdown."""
    about = frames.description
    summary = (
        f"Multi-agent experience in the environment `{about.task}`, collected with "
        f"marl_collect: {len(frames):,} frames, {statistics.episodes:,} complete "
        f"episodes, {frames.nbytes / 1e6:,.1f} MB in memory."
    )
    sections = [
        f"# {about.task}",
        summary,
        "## Environment",
        _settings(about.env_kwargs),
        groups_table(about.environment),
        "## Statistics",
        _episodes(about.environment, statistics),
        "## Keys",
        _ABOUT_KEYS,
        _keys(frames, statistics.ranges),
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


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "Settings: the defaults."
    return _table(("setting", "value"), ((k, repr(v)) for k, v in settings.items()))


def groups_table(environment: EnvDescription) -> str:
    """Return a table of the groups: their agents and the spaces of one agent."""
    return _table(GROUP_COLUMNS, group_rows(environment))


def group_rows(environment: EnvDescription) -> Iterator[tuple[str, ...]]:
    """Yield the texts of ``GROUP_COLUMNS`` for each group."""
    for name, group in environment.groups.items():
        agents = f"{group.n_agents}: {', '.join(group.agents)}"
        observation = describe_space(group.observation)
        yield name, agents, observation, describe_space(stored_action(group))


def _episodes(environment: EnvDescription, statistics: Statistics) -> str:
    if statistics.lengths is None or statistics.team_return is None:
        return "No episode is complete."
    groups = environment.groups
    summaries = {
        ("return", "all", "team sum"): statistics.team_return,
        **{
            ("return", name, agent): summary
            for name, agents in statistics.returns.items()
            for agent, summary in zip(groups[name].agents, agents, strict=True)
        },
        ("length", "", ""): statistics.lengths,
    }
    rows = ((*k, *map(number, vars(s).values())) for k, s in summaries.items())
    columns = ("per episode", "group", "agent", "mean", "std", "lowest", "highest")
    return _table(columns, rows)


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


def _keys(frames: "Transitions", ranges: Mapping[Key, Range]) -> str:
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
