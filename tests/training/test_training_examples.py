"""The examples of training run with a tiny budget, and write their files."""

import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages import skip_without

from marl_collect.envs import PettingZooEnv
from marl_collect.models import load_policy, make_policy, save_policy
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import PROGRESS

pytestmark = pytest.mark.processes

pytest_plugins = ["support.ray_cluster"]
EXAMPLES = Path(__file__).parents[2] / "examples"
PPO = "--frames 160 --batch 80 --minibatch 40 --epochs 1 --workers 1"
PIXELS = "--frames 40 --batch 20 --epochs 1 --workers 1 --envs 1 --limit 20"
MATRIX = "prisoners_dilemma_in_the_matrix__repeated"
RUNS = {
    "ddp_ppo": (f"--critic central {PPO}", "pettingzoo"),
    "ddp_ppo on Ray": (f"--actors 1 {PPO}", "ray"),
    "self_play_connect_four": (f"{PPO} --keep 1 --evaluate 2 --games 4", "pettingzoo"),
    "qmix_simple_spread": (
        "--frames 160 --batch 80 --warm-up 0 --updates 2 --minibatch 20 --games 2",
        "mpe2",
    ),
    "maddpg_simple_tag": (
        "--frames 160 --batch 80 --warm-up 0 --updates 2 --minibatch 20 --games 2",
        "mpe2",
    ),
    "behaviour_cloning": (
        "--episodes 4 --steps 4 --every 2 --minibatch 20 --games 4 --workers 1",
        "mpe2",
    ),
    "mappo_meltingpot": (
        f"--substrate {MATRIX} {PIXELS} --sequence 10 --minibatch 1 --games 2",
        "meltingpot",
    ),
    "population_matrix_game": (
        f"--substrate {MATRIX} {PIXELS} --size 3 --minibatch 10",
        "meltingpot",
    ),
}
CURRICULUM = "lbforaging_curriculum"


def run(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: str, folder: Path, *more: str
) -> None:
    """Run an example as a script that writes to a folder."""
    script = str(EXAMPLES / f"{name}.py")
    arguments = [script, *settings.split(), "--out", str(folder), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(script, run_name="__main__")


on_ray = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(500)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=on_ray if "Ray" in n else ()) for n in RUNS]
)
def test_an_example_prints_progress_and_writes_its_table_and_policy(
    name: str, tmp_path: Path, request: Any, monkeypatch: Any, capsys: Any
) -> None:
    settings, library = RUNS[name]
    pytest.importorskip(library)
    if library == "ray":
        request.getfixturevalue("cluster")  # The example uses this process's Ray.
    table, batch_done = tmp_path / PROGRESS, Checkpoint.batch_done
    table_exists = []

    def note(checkpoint: Checkpoint) -> None:
        table_exists.append(table.exists())
        batch_done(checkpoint)

    monkeypatch.setattr(Checkpoint, "batch_done", note)
    run(monkeypatch, name.split(maxsplit=1)[0], settings, tmp_path)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 1
    # The table grows while the example trains; this one has no checkpoint.
    assert table_exists[-1:] == ([] if name == "behaviour_cloning" else [True])
    header, *rows = table.read_text().splitlines()
    assert rows
    assert {len(row.split(",")) for row in (header, *rows)} == {header.count(",") + 1}
    for file in tmp_path.glob("*.pt"):
        load_policy(file)
    assert list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("name", ["self_play_connect_four", "qmix_simple_spread"])
def test_an_interrupted_example_goes_on_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, library = RUNS[name]
    pytest.importorskip(library)
    batch_done = Checkpoint.batch_done

    def batch_done_after_a_signal(checkpoint: Checkpoint) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        batch_done(checkpoint)

    run(monkeypatch, name, settings, tmp_path / "straight")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "batch_done", batch_done_after_a_signal)
        with pytest.raises(SystemExit) as excinfo:
            run(monkeypatch, name, settings, tmp_path / "stopped")
    assert excinfo.value.code == 130
    run(monkeypatch, name, settings, tmp_path / "stopped", "--resume")
    files = [tmp_path / folder / "policy.pt" for folder in ("straight", "stopped")]
    straight, resumed = (load_policy(file).state_dict() for file in files)
    assert all(torch.equal(value, resumed[key]) for key, value in straight.items())
    curves = [file.with_name(PROGRESS).read_text() for file in files]
    assert curves[0] == curves[1]


def test_the_example_of_a_curriculum_trains_every_kind_and_raises_the_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lbforaging")
    settings = "--seeds 3 --frames 1600 --batch 800 --every 1 --games 10 --good -1"
    threads = torch.get_num_threads()
    try:
        run(monkeypatch, CURRICULUM, settings, tmp_path)
    finally:
        torch.set_num_threads(threads)
    levels = {"curriculum": ["1", "2"], "uniform": ["0", "0"], "hardest": ["4", "4"]}
    printed = capsys.readouterr().out
    for kind, expected in levels.items():
        folder = tmp_path / f"{kind}_3"
        _, *rows = (folder / PROGRESS).read_text().splitlines()
        assert [row.split(",")[1] for row in rows] == expected
        load_policy(folder / "policy.pt")
        assert all(f"{kind}, level {level}: " in printed for level in range(5))


def test_an_example_is_short_and_says_how_to_run_it() -> None:
    for name in {run.split()[0] for run in RUNS} | {CURRICULUM}:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= (150 if name == "ddp_ppo" else 230)
        assert f"python examples/{name}.py" in text


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mappo_meltingpot", "--sequence 32", "--sequence must divide 100"),
        ("behaviour_cloning", "--teacher other.pt", "data exists: delete it"),
    ],
)
def test_an_example_refuses_what_would_give_wrong_results(
    name: str, settings: str, message: str, tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    skip_without("meltingpot", "needs the extra meltingpot")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    make_env = partial(PettingZooEnv, "simple_spread_v3")
    save_policy(tmp_path / "other.pt", make_policy(make_env), make_env)
    with pytest.raises(SystemExit) as raised:
        run(monkeypatch, name, settings, tmp_path)
    assert message in f"{raised.value}{capsys.readouterr().err}"
