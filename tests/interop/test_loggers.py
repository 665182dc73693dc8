"""TorchRL's loggers get each metric of a run once, also of a run that was resumed."""

import json
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("pettingzoo")

from support.runs import StopAt, StopError
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.cli.main import app
from marl_collect.errors import MissingPackageError
from marl_collect.interop import loggers
from marl_collect.interop.loggers import (
    LOGGERS,
    RunLogger,
    _environment,
    check_logger,
)
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.run_folder import LOGGER, RunFolder, read_rows
from marl_collect.training.trainer import Task, Trainer, Watcher

INSTALLED = [name for name, needed in LOGGERS.items() if all(map(find_spec, needed))]
OPTIONS = TrainingOptions().with_settings(
    {
        "frames": 160,
        "frames_per_batch": 40,
        "workers": 1,
        "envs_per_worker": 2,
        "eval_interval": 80,
        "eval_episodes": 2,
        "final_episodes": 2,
        "num_cells": [8],
        "ppo.epochs": 1,
    }
)
SETUP = Setup.parse("ippo-local-shared")
Curves = dict[str, Any]
"""Frames and values of each metric, by its name."""


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def csv_curves(run: Path) -> Curves:
    scalars = run / "csv" / "scalars"
    curves: Curves = {}
    for path in scalars.rglob("*.csv"):
        lines = [line.split(",") for line in path.read_text().splitlines()]
        name = path.relative_to(scalars).with_suffix("").as_posix()
        curves[name] = [(int(frames), float(value)) for frames, value in lines]
    return curves


def tensorboard_curves(run: Path) -> Curves:
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def mlflow_curves(run: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    (logged,) = client.search_runs([experiment.experiment_id])
    histories = {
        name: client.get_metric_history(logged.info.run_id, name)
        for name in logged.data.metrics
    }
    return {
        name: [(metric.step, metric.value) for metric in history]
        for name, history in histories.items()
    }


READ = {"csv": csv_curves, "tensorboard": tensorboard_curves, "mlflow": mlflow_curves}


def trainer(path: Path, logger: str, watcher: Watcher | None = None) -> Trainer:
    task = Task("workloads:Counting", CountingEnv, describe(CountingEnv), {})
    return Trainer(task, SETUP, OPTIONS, 0, path, watcher, logger=logger)


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in READ if name in INSTALLED])
def test_a_resumed_run_logs_each_metric_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(StopError):
        trainer(tmp_path, name, StopAt(120)).run()
    assert [row["frames"] for row in RunFolder(tmp_path).rows()] == [40, 80, 120]
    begun = RunFolder(tmp_path).read_json(LOGGER)
    trainer(tmp_path, name).run()
    assert RunFolder(tmp_path).read_json(LOGGER) == begun
    curves = READ[name](tmp_path)
    rows = read_rows(tmp_path / "progress.csv")
    assert [row["frames"] for row in rows] == [40, 80, 120, 160]
    for column in set(rows[0]) - {"frames"}:
        expected = [
            (row["frames"], pytest.approx(row[column], rel=1e-6))
            for row in rows
            if math.isfinite(row[column])
        ]
        assert curves.get(column, []) == expected, column
    evaluations = json.loads((tmp_path / "evaluations.json").read_text())
    returns = [
        (e["frames"], pytest.approx(sum(e["team_returns"]) / len(e["team_returns"])))
        for e in evaluations
    ]
    assert curves["evaluation/return_team"] == returns
    assert not list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("name", INSTALLED)
def test_a_log_can_be_written_and_continued(name: str, tmp_path: Path) -> None:
    state = None
    for frames in (40, 80):
        with RunLogger(name, tmp_path, "ippo/seed_0", "a:b", state) as log:
            log.settings({"seed": 0, "options": {"gamma": 0.5, "initial": None}})
            metrics = {"loss": frames / 100, "nan": math.nan, "infinite": math.inf}
            log.add(metrics | {"frames": 1.0}, frames)
            log.write()
            log.add({"loss": -1.0}, frames + 1)  # Never written.
            state = json.loads(json.dumps(log.state_dict()))
    if name in READ:
        expected = [(40, pytest.approx(0.4)), (80, pytest.approx(0.8))]
        curves = READ[name](tmp_path)
        assert curves["loss"] == expected
        assert not {"nan", "infinite", "frames"} & curves.keys()


def test_a_variable_is_set_inside_only() -> None:
    with _environment("MARL_TEST_RUN", "7"):
        assert os.environ["MARL_TEST_RUN"] == "7"
    assert "MARL_TEST_RUN" not in os.environ


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_an_error_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, package = LOGGERS[name]
    monkeypatch.setattr(
        f"{loggers.__name__}.find_spec",
        lambda which: None if which == package else find_spec(which),
    )
    monkeypatch.setattr(loggers, "LOGGERS", {name: (package,)})
    extra = package in ("torchrl", "tensorboard")
    wanted = '"marl-collect[loggers]"' if extra else package
    command = f"pip install {wanted}"
    message = f"The logger {name} needs {package}.*: {re.escape(command)}$"
    with pytest.raises(MissingPackageError, match=message):
        check_logger(name)
    arguments = ["compare", "workloads.counting:CountingEnv", "--logger", name]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2
    text = " ".join((result.stdout + result.stderr).split())
    assert f"The logger {name} needs {package}" in text
    assert not (tmp_path / "runs").exists()


def test_an_unknown_logger_is_refused(tmp_path: Path) -> None:
    message = (
        "^There is no logger 'wandbb'. Did you mean wandb. Expected one of "
        "tensorboard, csv, wandb, mlflow, trackio.$"
    )
    with pytest.raises(ValueError, match=message):
        check_logger("wandbb")
    result = CliRunner().invoke(app, ["compare", "simple_spread_v3", "--logger", "cvs"])
    assert result.exit_code == 2
    assert "There is no logger 'cvs'. Did you mean csv" in result.stderr
