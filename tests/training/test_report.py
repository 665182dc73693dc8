"""Folders of runs, tables of a comparison, and what its reports say in words."""

import io
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from workloads.counting import CountingEnv

from marl_collect.errors import MissingPackageError
from marl_collect.evaluation import CrossPlay
from marl_collect.evaluation.intervals import Interval, interquartile_mean
from marl_collect.training import evaluating
from marl_collect.training.evaluating import (
    EvaluationRecord,
    evaluate_policy,
    evaluator_of,
)
from marl_collect.training.options import TrainingOptions
from marl_collect.training.plots import curves
from marl_collect.training.report import conclusion, effects, markdown, rich_tables
from marl_collect.training.results import BEST_WEIGHTS, TEAM, Run
from marl_collect.training.run_folder import EPISODES, RunFolder, read_json, read_rows


def scored(setup: str, *scores: float) -> Any:
    """Return a setup without intervals, which take most of the time of a simulation."""
    value = interquartile_mean(scores)
    returns = {(TEAM, BEST_WEIGHTS): Interval(value, float("nan"), float("nan"))}
    return SimpleNamespace(
        setup=setup, returns=returns, scores=list(scores), seeds=len(scores)
    )


RANDOM: Any = EvaluationRecord(0, 2, [0.4, 0.6] * 50, [25] * 100)


def test_nothing_is_claimed_below_five_seeds() -> None:
    setups = [scored("a", 0, 1, 0, 1), scored("b", 9, 8, 9, 8, 9)]
    assert conclusion(setups, RANDOM) == (
        "b has the highest team return. With fewer than 5 seeds of each setup, no "
        "difference is shown. Not shown to exceed random actions: a."
    )


def test_the_conclusion_tells_setups_apart_by_a_corrected_test() -> None:
    low = scored("low", 0, 1, 0.2, 0.4, 1)
    near = scored("near", 8, 11, 12, 13, 9)
    best = scored("best", 10, 14, 12, 13, 11)
    assert conclusion([low, near, best], RANDOM) == (
        "best has the highest team return. Shown to be lower (p < 0.05): low. Not "
        "shown to differ from it: near. Not shown to exceed random actions: low."
    )
    # With more pairs, the same scores show less.
    further = [scored(f"more_{i}", 8, 11, 12, 13, 9) for i in range(2)]
    assert "So many" not in conclusion([low, near, best, *further[:1]])
    text = conclusion([low, near, best, *further])
    assert "Shown to be" not in text
    assert text.endswith("So many setups need more than 5 seeds.")


def test_equal_setups_have_the_highest_return_together() -> None:
    equal = [scored(name, *scores) for name, scores in (("a", [1, 2]), ("b", [2, 1]))]
    text = conclusion([scored("c", 0, 1), *equal])
    assert text.startswith("a and b have the highest team return. With fewer")


@pytest.mark.parametrize("seeds", [1, 3, 5, 10])
def test_setups_that_act_at_random_are_rarely_said_to_exceed_it(seeds: int) -> None:
    rng = np.random.default_rng(0)
    n_claims = 0
    for _ in range(400):
        episodes = rng.normal(size=200).tolist()
        random = EvaluationRecord(0, 2, episodes, [25] * 200)
        text = conclusion([scored("a", *rng.normal(size=seeds))], random)
        n_claims += "Not shown to exceed random actions: a." not in text
    assert n_claims <= 0.05 * 400


def test_each_property_is_judged_by_setups_that_differ_in_it_alone() -> None:
    low, high = np.arange(10.0), np.arange(10.0) + 20
    scores = {
        "ippo-local-own": high,
        "ippo-local-shared": low,
        "ippo-local-shared-ids": low + 0.5,
        "mappo-local-own": high + 20,
        "mappo-local-shared": low,
        "mappo-centralised-shared": high,
        "somebodys-own": high,
    }
    assert effects([scored(setup, *values) for setup, values in scores.items()]) == (
        "Team return by property (p < 0.05). Centralised critics instead of local "
        "ones: higher for mappo-local-own; no difference is shown for "
        "mappo-local-shared. Centralised observations instead of local ones: higher "
        "for mappo-centralised-shared. Shared networks instead of own ones: lower for "
        "ippo-local-shared and mappo-local-shared. Identities of agents: no difference "
        "is shown for ippo-local-shared-ids."
    )


def test_properties_need_five_seeds_and_more_for_many_pairs() -> None:
    algorithms = ["ippo", "iql", "vdn", "qmix", "maa2c", "iddpg", "maddpg"]

    def text(n_algorithms: int, seeds: int) -> str:
        return effects(
            [
                scored(f"{algorithm}-local-{net}", *(np.arange(seeds) + number))
                for algorithm in algorithms[:n_algorithms]
                for net, number in (("own", 0.0), ("shared", 100.0))
            ]
        )

    assert text(2, 4) == ""
    assert text(3, 5).endswith(
        "Shared networks instead of own ones: higher for ippo-local-shared, "
        "iql-local-shared and vdn-local-shared."
    )
    assert text(7, 5).endswith("So many pairs need more than 5 seeds.")
    assert effects([scored("a", *np.arange(9.0)), scored("ippo-local-own", 0.0)]) == ""


PPO = ["ippo-local-own", "ippo-local-shared", "mappo-local-own", "mappo-local-shared"]


@pytest.mark.parametrize(
    ("names", "says", "claims"),
    [
        (["a", "b"], conclusion, "Shown to be lower"),
        (["a", "b", "c"], conclusion, "Shown to be lower"),
        (PPO, effects, "er for"),
    ],
)
@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("kind", ["normal", "ties", "outliers"])
def test_equal_setups_are_rarely_said_to_differ(
    kind: str, seeds: int, names: list[str], says: Callable[..., str], claims: str
) -> None:
    rng = np.random.default_rng(0)
    draw = {
        "normal": rng.standard_normal,
        "ties": lambda size: rng.integers(0, 3, size).astype(float),
        "outliers": rng.standard_cauchy,
    }[kind]
    n_claims = 0
    for _ in range(400):
        n_claims += claims in says([scored(name, *draw(seeds)) for name in names])
    assert n_claims <= 0.05 * 400
    if seeds < 5:
        assert n_claims == 0


def test_setups_that_exceed_random_actions_are_told_with_five_seeds() -> None:
    assert "random" not in conclusion([scored("a", 1, 2, 1, 2, 3)], RANDOM)
    text = conclusion([scored("a", 1, 2, 1, 2)], RANDOM)
    assert text.endswith("Not shown to exceed random actions: a.")


def test_one_seed_has_no_interval() -> None:
    page = markdown([finished_run()], "a task", RANDOM, None)
    assert "![" not in page
    with_curves = markdown([finished_run()], "a task", RANDOM, "curves.png")
    assert "](curves.png)" in with_curves
    assert "| 10.0 | 20.0 | 30.0 | 90.0 |" in page
    assert "Return of random actions: team 0.50 (0.48 to 0.52), per agent 0.25" in page
    assert "nan" not in page
    two = [finished_run(), replace(finished_run(), seed=1)]
    assert "| 10.0 (10.0 to 10.0) |" in markdown(two, "a task", None, None)


def test_untrained_weights_are_not_the_best_evaluation() -> None:
    first, *others = finished_run().evaluations
    run = replace(finished_run(), evaluations=[evaluation(0, 1_000), *others])
    assert run.peak.frames == 100
    equal = [evaluation(frames, 7) for frames in (100, 200)]
    assert replace(run, evaluations=equal).peak.frames == 200
    assert replace(run, evaluations=[first]).peak == first


def evaluation(frames: int, team: float) -> EvaluationRecord:
    return EvaluationRecord(frames, 2, [team], [25])


def finished_run() -> Run:
    """Return a run whose four returns of the team are 10, 20, 30 and 90."""
    return Run(
        task="a_task",
        setup="ippo-local-shared",
        seed=0,
        options={
            "frames": 200,
            "eval_interval": 100,
            "eval_episodes": 1,
            "final_episodes": 1,
        },
        evaluations=[evaluation(0, 1), evaluation(100, 90), evaluation(200, 2)],
        best=evaluation(100, 10),
        last=evaluation(200, 20),
        training={"return_team": 30.0, "return_agent": 15.0},
        seconds={"collecting": 1.0, "training": 2.0},
        policy_parameters=1,
        updates=1,
        cpu_seconds=1234.6,
    )


def test_the_biased_return_is_the_last_in_a_report() -> None:
    page = markdown([finished_run()], "a task", None, None)
    rows = [
        [cell.partition(" (")[0].strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    team, agent = rows[:3], rows[3:6]
    headings = ["best weights", "last weights", "sampled actions", "best evaluation"]
    assert team[0] == ["setup", "seeds", *headings]
    assert team[2] == ["ippo-local-shared", "1", "10.0", "20.0", "30.0", "90.0"]
    assert agent[0] == ["setup", *headings, "episode, best weights"]
    assert agent[2][1:] == ["5.00", "10.0", "15.0", "45.0", "25 frames"]
    assert rows[6][3:] == ["CPU seconds", "collected frames/s", "trained frames/s"]
    assert rows[8][3:] == ["1,235", "200", "100"]


def test_evaluations_outside_of_the_axis_are_written_into_the_picture() -> None:
    pytest.importorskip("matplotlib")
    run = finished_run()
    texts = []
    for untrained in (1, 900, -900):
        run = replace(run, evaluations=[evaluation(0, untrained), *run.evaluations[1:]])
        figure = curves([run], "a task")
        texts.append([text.get_text() for text in figure.axes[0].texts])
    above, below = "untrained: up to 900, above", "untrained: down to -900, below"
    assert texts == [[""], [above], [below]]


def test_a_dollar_in_a_name_begins_no_formula() -> None:
    pytest.importorskip("matplotlib")
    name = "$\\frac{$"
    runs = [replace(finished_run(), setup=name), finished_run()]
    figure = curves(runs, name, baselines={name: 1.04})
    figure.savefig(io.BytesIO(), format="png")
    labels = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert any(label.endswith("{$ 1.04") for label in labels), labels


@pytest.mark.parametrize(
    "draw",
    [
        lambda: curves([finished_run()], "a task"),
        lambda: CrossPlay(("a",), np.zeros((1, 1, 3))).plot("matrix.png"),
    ],
    ids=["curves", "matrix"],
)
def test_without_matplotlib_the_error_names_the_extra(
    draw: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"marl-collect\[plot\]"):
        draw()


def test_two_tables_fit_a_terminal_of_80_columns() -> None:
    """The longest name of a setup, and returns in the thousands."""
    run = replace(
        finished_run(),
        setup="mappo-centralised-shared-ids",
        best=evaluation(100, -1234.5),
        last=evaluation(200, -2345.6),
        policy_parameters=1_234_567,
        updates=123_456,
    )
    tables = rich_tables([run, replace(run, seed=1)], "a_task")
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(*tables)
    rows = [
        line.split()[1:]
        for line in captured.get().splitlines()
        if line.startswith("mappo-centralised-shared-ids ")
    ]
    best = ["-1234.5"] * 3
    assert rows[0] == ["2", *best, "-2345.6", "30.0"]
    assert rows[1:] == [["1,234,567", "123,456", "200", "100"]]


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for frames in (10, 20, 30):
        folder.add_row({"frames": frames, "loss": 0.5})
    folder.keep_rows(2)
    folder.add_row({"frames": 31, "loss": 1.0})
    assert [row["frames"] for row in folder.rows()] == [10, 20, 31]
    with pytest.raises(ValueError, match=r"progress.csv is damaged: .* 4 rows, .* 3\."):
        folder.keep_rows(4)
    folder.keep_rows(0)
    folder.add_row({"loss": 1.0})  # A run that begins again may have other columns.
    assert folder.rows() == [{"loss": 1.0}]


def test_an_incomplete_last_row_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10, "loss": 0.5})
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("20")
    assert folder.rows() == [{"frames": 10, "loss": 0.5}]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10})
    with pytest.raises(ValueError, match="has the columns"):
        folder.add_row({"frames": 10, "loss": 0.5})


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    message = "run is being written to by another process"
    with folder.lock(), pytest.raises(BlockingIOError, match=message):
        folder.lock()
    folder.lock().close()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def test_reading_runs_no_code(here: Path) -> None:
    torch.save({"collector": Trap()}, here / "last.pt")
    with pytest.raises(ValueError, match="last.pt is damaged, or holds no tensors"):
        RunFolder(here).read_checkpoint("last.pt")
    assert not (here / "sprung").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.symlink("/dev/zero", p)])
@pytest.mark.parametrize("read", [read_json, read_rows])
def test_no_link_or_pipe_of_a_run_is_read(read: Any, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"(link|not a regular file).*a'"):
        read(tmp_path / "a")


class Returning:
    """An evaluator whose only episode has these returns of agents."""

    def __init__(self, *values: float) -> None:
        self.values = values

    environments = 1

    def evaluate(self, episodes: Any, *, seeds: Any, first: Any) -> Any:
        del seeds
        assert episodes == first + 1
        return SimpleNamespace(
            episodes=[SimpleNamespace(returns={"agents": self.values})],
            team_returns=[sum(self.values)],
            lengths=[3],
        )


ONE = TrainingOptions().with_settings({"eval_episodes": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_an_error(value: Any, tmp_path: Path) -> None:
    evaluator: Any = Returning(value)
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="reward of agents in an evaluation is NaN"):
        evaluate_policy(evaluator, ONE, folder, {}, frames=0)
    for values, team in (
        ((1.0,), 1.0),
        ((0.0, 0.0), 0.0),
        ((-2e-5 / 3, 0.0), -6.66667e-6),
        ((20.0 / 3, 200.0), 206.667),
        ((300.0, -100.0, -200.00001), 0.0),  # A zero-sum game.
    ):
        evaluator = Returning(*values)
        assert evaluate_policy(evaluator, ONE, folder, {}, frames=0).team == team


@pytest.mark.processes
def test_evaluations_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainingOptions().with_settings(
        {"eval_episodes": 9, "envs_per_worker": 2, "workers": 1}
    )
    folder, about = RunFolder(tmp_path), {"setup": "random"}
    monkeypatch.setattr(evaluating, "_NOTE_SECONDS", 0.0)
    with evaluator_of(None, CountingEnv, options) as evaluator:
        expected = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert not (tmp_path / EPISODES).exists()
        played: list[int] = []
        evaluate = evaluator.evaluate

        def evaluate_or_stop(episodes: int, **keywords: Any) -> Any:
            played.append(keywords["first"])
            if len(played) == 3:
                raise KeyboardInterrupt
            return evaluate(episodes, **keywords)

        monkeypatch.setattr(evaluator, "evaluate", evaluate_or_stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played == [0, 2, 6]  # Slices grow while they are short.
        resumed = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played[3:] == [6, 8]
        assert resumed == expected
        folder.write_json(EPISODES, {"about": "another", "record": None})
        assert evaluate_policy(evaluator, options, folder, about, frames=0) == expected
