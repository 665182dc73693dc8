"""Commands take the folder of a run, with its task, settings and policy."""

import shutil
from pathlib import Path

import pytest
from support.commands import output_of
from support.runs import SHORT, flags

pytest.importorskip("matplotlib")
pytest.importorskip("mpe2")

from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.runs import what_to_play
from marl_collect.storage import open_dataset

pytestmark = pytest.mark.processes

TASK = "simple_spread_v3"
SETTINGS = SHORT | {"max_frames_per_traj": 5, "ppo.epochs": 1}


def acting(source: str = "") -> PolicyRequest:
    return PolicyRequest(source, centralised=False, share_params=True, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison with one run, whose settings are its own."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["--frames=40", "--seeds=1", "--workers=1", "--setup=ippo-local-shared"]
    arguments += ["--env=N=2", "--env=max_cycles=30"]
    output_of("compare", TASK, *arguments, *flags(SETTINGS), "--out", str(folder))
    return folder


def test_a_folder_stands_for_task_settings_and_policy(trained: Path) -> None:
    folder = trained / "ippo-local-shared" / "seed_0"
    expected = output_of(
        *("play", TASK, "--policy", str(folder / "checkpoints" / "best.pt")),
        *("--env=N=2", "--env=max_cycles=30"),
        *("--max-frames-per-traj=5", "--episodes=3"),
    )
    assert " mean 5.0 " in expected
    for arguments in (
        [str(folder)],
        [str(trained)],  # It has one run.
        [TASK, "--policy", str(folder)],
        [TASK, "--policy", str(folder / "checkpoints" / "best.pt")],
    ):
        assert output_of("play", *arguments, "--episodes=3") == expected


def test_the_settings_of_a_run_of_another_task_are_not_used(trained: Path) -> None:
    played = what_to_play("other", acting(str(trained)), ["a=1"], None)
    assert (played.env_kwargs, played.max_frames_per_traj) == ({"a": 1}, None)
    played = what_to_play("other", acting(), None, None)
    assert played.policy.source == "random"


def test_collect_writes_data_of_a_run(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    output_of("collect", str(trained), "--frames=40", "--out", str(out), "--quiet")
    assert max(open_dataset(out).trajectories.lengths) == 5


def test_a_folder_with_the_name_of_a_task_is_not_taken_for_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "simple_tag_v3")
    (tmp_path / "random").mkdir()
    for policy, expected in (("", "random"), ("mlp", "mlp")):
        play = what_to_play("simple_tag_v3", acting(policy), None, None)
        assert (play.task, play.policy.source) == ("simple_tag_v3", expected)
    play = what_to_play("./simple_tag_v3", acting(), None, None)
    assert play.task == TASK
