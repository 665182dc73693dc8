"""Reports of a comparison: tables, a Markdown page, and JSON.

Source of the JSON format: Gorsane et al., "Towards a Standardised Performance
Evaluation Protocol for Cooperative MARL", arXiv 2209.10485, and marl-eval's README.
Source of the adjusted p-values: Holm, "A Simple Sequentially Rejective Multiple Test
Procedure", Scandinavian Journal of Statistics 6.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from marl_collect.evaluation.intervals import Interval, bootstrap, rank_sum_p
from marl_collect.programs.printable import markdown_row
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.options import Setup
from marl_collect.training.results import (
    AGENT,
    BEST_WEIGHTS,
    LAST_WEIGHTS,
    RETURNS,
    SAMPLED_ACTIONS,
    TEAM,
    Run,
    Summary,
    summarize,
)

Column = tuple[str, Callable[[Summary], Interval | str]]


def _returns(whose: str) -> list[Column]:
    """Return the columns of the returns of the team, or per agent."""

    def column(name: str) -> Column:
        return name, lambda s: s.returns[whose, name]

    return [column(name) for name in RETURNS]


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


SETUP: Column = ("setup", lambda s: s.setup)
SEEDS: Column = ("seeds", lambda s: str(s.seeds))
PARAMETERS: Column = (
    "policy parameters",
    lambda s: _count(s.policy_parameters),
)
STEPS: Column = (
    "gradient steps",
    lambda s: _count(s.updates),
)
CPU_SECONDS: Column = (
    "CPU seconds",
    lambda s: _count(s.cpu_seconds),
)
SPEEDS: list[Column] = [
    ("collected frames/s", lambda s: f"{s.collected:,.0f}"),
    ("trained frames/s", lambda s: f"{s.trained:,.0f}"),
]
TABLES: dict[str, list[Column]] = {
    "return of the team, the sum over its agents": [SETUP, SEEDS, *_returns(TEAM)],
    "return per agent, the mean": [
        SETUP,
        *_returns(AGENT),
        ("episode, best weights", lambda s: f"{s.length.value:.0f} frames"),
    ],
    "costs of a run": [SETUP, PARAMETERS, STEPS, CPU_SECONDS, *SPEEDS],
}
"""The tables of the Markdown page."""
TERMINAL_TABLES: dict[str, list[Column]] = {
    "return of the team": [
        SETUP,
        SEEDS,
        (BEST_WEIGHTS, lambda s: s.returns[TEAM, BEST_WEIGHTS]),
        (LAST_WEIGHTS, lambda s: s.returns[TEAM, LAST_WEIGHTS].parts[0]),
        (SAMPLED_ACTIONS, lambda s: s.returns[TEAM, SAMPLED_ACTIONS].parts[0]),
    ],
    "costs of a run": [SETUP, PARAMETERS, STEPS, *SPEEDS],
}
"""What decides between setups, in the 80 columns of a terminal."""
_SEEDS = 5
"""Runs of each setup from which a test can tell apart two of up to four setups."""
_LEVEL = 0.05
_JOINT_CRITICS = {"mappo": "ippo", "maa2c": "ia2c", "maddpg": "iddpg"}
"""Algorithms whose critic sees all agents, and the same ones with local critics."""
_PROPERTIES: dict[str, Callable[[Setup], Setup]] = {
    "centralised critics instead of local ones": lambda s: replace(
        s, algorithm=_JOINT_CRITICS.get(s.algorithm, s.algorithm)
    ),
    "centralised observations instead of local ones": partial(
        replace, centralised=False
    ),
    "shared networks instead of own ones": partial(replace, share_params=False),
    "identities of agents": partial(replace, agent_ids=False),
}
"""Functions that return a setup without a property."""

LEGEND = (
    "- Best weights, last weights: the weights of the best evaluation during training, "
    "and the weights at its end. Both are evaluated after training on new episodes.\n"
    "- Sampled actions: the last hundred training episodes. The other columns use "
    "deterministic actions.\n"
    "- Best evaluation: the highest mean return among the evaluations during "
    "training. This selection biases it upwards.\n"
    "- Values are interquartile means over seeds with 95 % stratified bootstrap "
    "intervals (Agarwal et al. 2021). With few seeds, an interval is little more than "
    "the range of the seeds, and one seed has none.\n"
    "- Setups with five seeds or more are compared by exact rank-sum tests of the best "
    "weights. Their p-values are multiplied by the number of pairs of setups. They "
    "exceed random actions if a sign test says so of the best weights and the upper "
    "end of the interval over random episodes.\n"
    "- Setups that differ in one property are compared by the same test. Their "
    "p-values are adjusted for the number of these pairs by Holm's method.\n"
    "- Gradient steps: number per run. It may differ between setups with equal "
    "frames.\n"
    "- CPU seconds: mean per run, of all threads of the process that trains and of the "
    "workers.\n"
    "- Collected frames/s, trained frames/s: frames per second of time spent "
    "collecting and training. A frame is one step of one environment, regardless of "
    "the number of agents."
)


TERMINAL_LEGEND = (
    "The return of the team is the sum over its agents. Best weights (with a 95 % "
    "interval over seeds) and last weights play new episodes with deterministic "
    "actions; sampled actions are the last hundred training episodes. The report "
    "explains every column, and adds returns per agent."
)


def rich_tables(runs: Sequence[Run], title: str) -> list[Table]:
    """Return the tables for a terminal of 80 columns.

    The interval of the best weights has columns of its own.
    """
    summaries = summarize(runs)
    return [
        _table(f"{title}: {name}", columns, summaries)
        for name, columns in TERMINAL_TABLES.items()
    ]


def _table(
    heading: str, columns: Sequence[Column], summaries: Sequence[Summary]
) -> Table:
    """Return one table; the first column has the names of the setups."""
    (first, names), *others = columns
    table = Table(
        title=heading,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        min_width=len(heading),
    )
    table.add_column(first, no_wrap=True)
    rows = [[str(names(summary))] for summary in summaries]
    for column, show in others:
        # Words below each other: rich would cut numbers to make room for a heading.
        words = column.replace(" ", "\n")
        _add_column(table, rows, words, [show(s) for s in summaries])
    for row in rows:
        table.add_row(*row)
    return table


def _add_column(
    table: Table, rows: list[list[str]], heading: str, cells: Sequence[Interval | str]
) -> None:
    """Add a column, or three of an interval: its value and both ends."""
    intervals = [cell for cell in cells if isinstance(cell, Interval)]
    if not intervals:
        table.add_column(heading, justify="right")
        for row, cell in zip(rows, cells, strict=True):
            row.append(str(cell))
        return
    for name in (heading, "low", "high"):
        table.add_column(name, justify="right")
    for row, interval in zip(rows, intervals, strict=True):
        row += interval.parts


def markdown(
    runs: Sequence[Run],
    title: str,
    random: EvaluationRecord | None,
    curves: str | None,
) -> str:
    """Return the report as a Markdown page.

    Args:
        runs: runs of one task.
        title: of the page's section.
        random: evaluation of random actions, if measured.
        curves: path of the picture relative to the page, if there is one.
    """
    summaries = summarize(runs)
    lines = [f"## {title}", "", *_about(runs)]
    for paragraph in findings(summaries, random):
        lines += [paragraph, ""]
    if curves is not None:
        lines += [f"![Return of the team over frames]({curves})", ""]
    for name, columns in TABLES.items():
        lines += [
            f"{name.capitalize()}:",
            "",
            markdown_row([heading for heading, _ in columns]),
        ]
        lines += [markdown_row(["---"] + ["---:"] * (len(columns) - 1))]
        lines += [
            markdown_row([str(show(s)) for _, show in columns]) for s in summaries
        ]
        lines += [""]
    return "\n".join(lines)


def findings(
    summaries: Sequence[Summary], random: EvaluationRecord | None
) -> list[str]:
    """Return the paragraphs above the tables: random actions and the conclusions.

    Args:
        summaries: of the setups; fewer than two have no conclusion.
        random: evaluation of random actions, if measured.
    """
    paragraphs = []
    if random is not None:
        returns = f"team {_random_return(random)}, per agent {Interval(random.agent)}"
        length = f"{random.length:.0f} frames per episode"
        paragraphs.append(f"Return of random actions: {returns}; {length}.")
    if len(summaries) > 1:
        paragraphs.append(conclusion(summaries, random))
    if answers := effects(summaries):
        paragraphs.append(answers)
    return paragraphs


def conclusion(
    summaries: Sequence[Summary], random: EvaluationRecord | None = None
) -> str:
    """Say which setups' best weights have the highest return of the team.

    Two setups are told apart by an exact rank-sum test over seeds. Its p-value is
    multiplied by the number of pairs, because the best setup is chosen by its scores.
    With fewer than five seeds no difference is claimed.

    Args:
        summaries: of at least one setup.
        random: evaluation of random actions, if measured.
    """
    returns = {s.setup: s.returns[TEAM, BEST_WEIGHTS] for s in summaries}
    scores = {s.setup: s.scores for s in summaries}
    best, *others = sorted(returns, key=lambda setup: -returns[setup].value)
    equal = [setup for setup in others if returns[setup].value == returns[best].value]
    text = f"{best} has the highest team return."
    if equal:
        text = f"{_listed([best, *equal])} have the highest team return."
    pairs = len(returns) * (len(returns) - 1) // 2
    if min(map(len, scores.values())) < _SEEDS:
        text += (
            f" With fewer than {_SEEDS} seeds of each setup, no difference is shown."
        )
    else:
        lower = [
            setup
            for setup in others
            if rank_sum_p(scores[best], scores[setup]) * pairs < _LEVEL
        ]
        close = [setup for setup in others if setup not in lower]
        if lower:
            text += f" Shown to be lower (p < {_LEVEL}): {_listed(lower)}."
        if close:
            text += f" Not shown to differ from it: {_listed(close)}."
        if close and _least_p(scores) * pairs >= _LEVEL:
            text += f" So many setups need more than {_SEEDS} seeds."
    if random is not None:
        chance = _random_return(random).high
        low = [s for s in (best, *others) if not _exceeds(scores[s], chance)]
        if low:
            text += f" Not shown to exceed random actions: {_listed(low)}."
    return text


def effects(summaries: Sequence[Summary]) -> str:
    """Say where a property of setups raises or lowers the return of the team.

    Each setup is compared with the one that lacks the property and is the same
    otherwise, by an exact rank-sum test over seeds of the best weights. The p-values
    of all pairs are adjusted together by Holm's method, so the chance of any false
    claim is at most 5 %.

    Args:
        summaries: of the setups. Pairs with fewer than five seeds of a setup do not
            count; without a pair, the text is empty.
    """
    scores = {s.setup: s.scores for s in summaries if s.seeds >= _SEEDS}
    pairs = [
        (name, setup, other)
        for name, without in _PROPERTIES.items()
        for setup in scores
        if (other := _name_of(setup, without)) != setup and other in scores
    ]
    p_values = [rank_sum_p(scores[one], scores[two]) for _, one, two in pairs]
    shown, least = set(), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        least = max(least, p_values[index] * (len(pairs) - rank))
        if least < _LEVEL:
            shown.add(pairs[index])
    sentences = []
    for name in _PROPERTIES:
        verdicts: dict[str, list[str]] = {}
        for pair in pairs:
            if pair[0] == name:
                verdict = "no difference is shown"
                if pair in shown:
                    higher = np.greater.outer(scores[pair[1]], scores[pair[2]]).mean()
                    verdict = "higher" if higher > 0.5 else "lower"
                verdicts.setdefault(verdict, []).append(pair[1])
        parts = [f"{text} for {_listed(verdicts[text])}" for text in sorted(verdicts)]
        if parts:
            sentences.append(f"{name.capitalize()}: {'; '.join(parts)}.")
    if not sentences:
        return ""
    text = f"Team return by property (p < {_LEVEL}). {' '.join(sentences)}"
    if not shown and _least_p(scores) * len(pairs) >= _LEVEL:
        text += f" So many pairs need more than {_SEEDS} seeds."
    return text


def _name_of(setup: str, without: Callable[[Setup], Setup]) -> str:
    """Return the name of a setup without a property; its own if it has no such form."""
    try:
        return without(Setup.parse(setup)).name
    except ValueError:  # Somebody else's algorithm.
        return setup


def _random_return(random: EvaluationRecord) -> Interval:
    """Return the team's mean return over the episodes of random actions."""
    return bootstrap([random.team_returns], estimate=np.mean)


def _exceeds(scores: Sequence[float], chance: float) -> bool:
    """Return whether a sign test shows scores to be higher than chance."""
    above = sum(score > chance for score in scores)
    ways = sum(comb(len(scores), k) for k in range(above, len(scores) + 1))
    return ways / 2 ** len(scores) < _LEVEL


def _least_p(scores: Mapping[str, Sequence[float]]) -> float:
    """Return the p-value of two setups whose scores do not overlap."""
    fewest, next_fewest, *_ = sorted(map(len, scores.values()))
    return 2 / comb(fewest + next_fewest, fewest)


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def results_json(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the runs in the format that marl-eval, Mava and BenchMARL read.

    The data are nested: environment, task, algorithm, seed, ``step_k``, metric. A
    metric is a list with a value per episode. ``absolute_metrics``, next to the steps,
    has the metrics of the final evaluation of the best weights.
    """
    data: dict[str, Any] = {}
    for run in runs:
        environment, _, task = run.task.rpartition("/")
        steps: dict[str, Any] = {
            f"step_{index}": {"step_count": record.frames} | _metrics(record)
            for index, record in enumerate(run.evaluations)
        }
        if run.best is not None:
            steps["absolute_metrics"] = _metrics(run.best)
        tasks = data.setdefault(environment or "pettingzoo", {})
        algorithms = tasks.setdefault(task, {})
        algorithms.setdefault(run.setup, {})[f"seed_{run.seed}"] = steps
    return data


def _about(runs: Sequence[Run]) -> list[str]:
    options = runs[0].options
    episodes, every = options["eval_episodes"], options["eval_interval"]
    budget = (
        f"{options['frames']:,} frames per run; evaluations of {episodes} episodes "
        f"every {every:,} frames, and of {options['final_episodes']} at the end."
    )
    about = [budget, ""]
    if unfinished := unfinished_runs(runs):
        about += [unfinished, ""]
    return about


def unfinished_runs(runs: Sequence[Run]) -> str:
    """Return a sentence about runs without a final evaluation, if there are any."""
    unfinished = sum(run.best is None for run in runs)
    if not unfinished:
        return ""
    some = f"{unfinished} of {len(runs)}"
    return f"Unfinished runs, which appear in the curves only: {some}."


def _metrics(record: EvaluationRecord) -> dict[str, list[float]]:
    return {
        "team_return": record.team_returns,
        "mean_agent_return": record.agent_returns,
        "episode_length": [float(length) for length in record.lengths],
    }
