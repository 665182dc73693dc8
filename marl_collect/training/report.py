"""The report of a comparison: the table for the terminal and for a page."""

from collections.abc import Callable, Sequence

from rich.table import Table

from marl_collect.training.evaluating import Window
from marl_collect.training.results import Run, Summary, summarize

Column = tuple[str, Callable[[Summary], str]]

TEAM: list[Column] = [
    ("setup", lambda s: s.setup),
    ("seeds", lambda s: str(s.seeds)),
    ("best window", lambda s: str(s.peak_team)),
    ("best weights", lambda s: str(s.best_team)),
    ("last weights", lambda s: str(s.last_team)),
    ("drawn", lambda s: str(s.drawn_team)),
]
AGENT: list[Column] = [
    ("setup", lambda s: s.setup),
    ("best window", lambda s: str(s.peak_agent)),
    ("best weights", lambda s: str(s.best_agent)),
    ("last weights", lambda s: str(s.last_agent)),
    ("drawn", lambda s: str(s.drawn_agent)),
    ("episode, best weights", lambda s: f"{s.best_length.value:.0f} frames"),
]
COSTS: list[Column] = [
    ("setup", lambda s: s.setup),
    ("policy", lambda s: f"{s.costs['policy_parameters']:,}"),
    ("trained", lambda s: f"{s.costs['parameters']:,}"),
    ("MB", lambda s: f"{s.costs['memory'] / 1e6:.2f}"),
    ("forward ms", lambda s: f"{s.costs['forward_ms']:.1f}"),
    ("backward ms", lambda s: f"{s.costs['backward_ms']:.1f}"),
    ("collected/s", lambda s: f"{s.collected:,.0f}"),
    ("learnt/s", lambda s: f"{s.trained:,.0f}"),
]
TABLES: dict[str, list[Column]] = {
    "return of the team, the sum over its agents": TEAM,
    "return per agent, the mean": AGENT,
    "costs": COSTS,
}
LEGEND = (
    "Best window: the best evaluation during training. Best and last weights: "
    "evaluated once more at the end, on episodes that chose nothing. These three take "
    "the likeliest action; drawn: the last hundred episodes of training. Each figure "
    "is the interquartile mean over seeds, with its 95 % stratified bootstrap interval "
    "(Agarwal et al. 2021); with few seeds the interval is hardly more than their "
    "range. Policy and trained: parameters of the policy, and of all networks. MB: "
    "weights, gradients, the optimiser's moments, target networks, and what the "
    "backward pass of a minibatch keeps. Forward and backward: of a minibatch's loss. "
    "Collected and learnt: frames per second of the time spent on either; a frame is "
    "one step of one environment, however many agents act."
)


def rich_tables(runs: Sequence[Run], title: str) -> list[Table]:
    """Return the tables for a terminal."""
    summaries = summarize(runs)
    tables = []
    for name, columns in TABLES.items():
        table = Table(title=f"{title}: {name}")
        for heading, _ in columns:
            first = heading == "setup"
            table.add_column(
                heading, justify="left" if first else "right", no_wrap=first
            )
        for summary in summaries:
            table.add_row(*(show(summary) for _, show in columns))
        tables.append(table)
    return tables


def markdown(
    runs: Sequence[Run], title: str, random: Window | None, curves: str | None
) -> str:
    """Return the report as a page.

    Args:
        runs: of one task.
        title: of the page's section.
        random: random actions in the same evaluation, if measured.
        curves: path of the picture, relative to the page, if there is one.
    """
    summaries = summarize(runs)
    lines = [f"## {title}", "", *_about(runs)]
    if random is not None:
        figures = f"team {random.team:.1f}, per agent {random.agent:.1f}"
        length = f"{random.length:.0f} frames per episode"
        lines += [f"Random actions: {figures}, {length}.", ""]
    if curves is not None:
        lines += [f"![Return of the team over frames]({curves})", ""]
    for name, columns in TABLES.items():
        lines += [
            f"{name.capitalize()}:",
            "",
            _row([heading for heading, _ in columns]),
        ]
        lines += [_row(["---"] + ["---:"] * (len(columns) - 1))]
        lines += [_row([show(s) for _, show in columns]) for s in summaries]
        lines += [""]
    return "\n".join(lines)


def _about(runs: Sequence[Run]) -> list[str]:
    options = runs[0].options
    unfinished = sum(run.best is None for run in runs)
    each, every = options["eval_episodes"], options["eval_interval"]
    budget = (
        f"{options['frames']:,} frames per run; evaluations of {each} episodes every "
        f"{every:,} frames, and of {options['final_episodes']} at the end."
    )
    about = [budget, ""]
    if unfinished:
        some = f"{unfinished} of the {len(runs)} runs are"
        about += [f"{some} not finished: in the curves, but not in the tables.", ""]
    return about


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
