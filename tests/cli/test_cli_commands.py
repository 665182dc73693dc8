"""Commands without a collection: help, lists, datasets, errors before a start."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import error_of, output_of, run
from support.datasets import record_here
from support.packages import hide, skip_without
from workloads.counting import CountingEnv

from marl_collect import Collector, evaluate, open_dataset, record
from marl_collect.cli.histograms import episode_panels, reward_panels
from marl_collect.storage import DatasetDescription, RunDescription, Writer

COUNTING = "workloads.counting:CountingEnv"


def test_a_file_of_the_name_of_an_unknown_task_is_mentioned(here: Path) -> None:
    (here / "race.py").touch()
    for task in ("race", "race.py", "./race.py"):
        text = error_of("info", task)
        assert "race.py builds, add its name: race:NAME." in text
    assert "race.py" not in run("info", "rac")[1]


def test_absent_tasks_are_refused_with_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mpe2", "meltingpot")
    text = error_of("collect", "simple_spread_v3")
    assert 'mpe: pip install "marl-collect[mpe]"' in text
    text = error_of("collect", "meltingpot/coins")
    assert "meltingpot/coins needs meltingpot: " in text
    assert 'pip install "marl-collect[meltingpot]"' in text
    text = output_of("envs")
    assert "meltingpot/... " in text
    assert "mpe/simple" not in text


REFUSED = {
    f"collect {COUNTING} --frames 0": "Invalid value for '--frames'",
    f"collect {COUNTING} --workers 0": "Invalid value for '--workers'",
    f"collect {COUNTING} --seed -1": "Invalid value for '--seed'",
    f"collect {COUNTING} --env n_walkers": "--env n_walkers must be KEY=VALUE",
    f"collect {COUNTING} --policy best": "expected mlp, random, the folder of a run",
    f"collect {COUNTING} --frames=9 --episodes=2": "either --frames or --episodes",
    f"collect {COUNTING} --policy=random --centralised": "--centralised: these opt",
    **{f"collect {task}": task for task in ("nowhere:make", "os:nothing", "os:sep")},
    f"collect {COUNTING} --policy=": "It is empty",
    f"play {COUNTING} --policy=": "It is empty",
    f"render {COUNTING} --policy=": "It is empty",
    f"play {COUNTING} --policy nowhere.pt": "nowhere.pt",
    "info nowhere/balance": "'nowhere' is no family of tasks: expected",
    "info simple_spread_v3 --env N=abc": "N is the text 'abc', its default 3 is a num",
    "info simple_spread_v3 --env group_map=one": "group_map must be one of ['all_in_o",
    "compare": "Expected a TASK",
    "compare simple_sprad_v3 --settings": "Did you mean mpe/simple_spre",
    "compare no:Env --settings": "There is no task 'no:Env'",
    f"compare {COUNTING} --setup masac": "There is no setup 'masac'",
    f"compare {COUNTING} --setup maddpg-local-shared": (
        "maddpg-local-shared cannot be trained: maddpg needs continuous actions"
    ),
    f"compare {COUNTING} --setup=ippo-local-own --setup=qmix-local-own": (
        "qmix-local-own cannot be trained: qmix learns the values of one"
    ),
    f"compare {COUNTING} --set ppo.learning_rate=1": "Did you mean ppo.lr?",
    f"compare {COUNTING} --set ppo.epochs=0": "ppo.epochs must be an integer",
    f"compare {COUNTING} --set initial=nowhere": "nowhere is neither",
    f"compare {COUNTING} --setup=ippo-local-own --frames 40 --set value.tau=0.5": (
        "The setting value.tau has no effect on ippo-local-own"
    ),
    f"compare {COUNTING} --set lr": "--set lr must be KEY=VALUE",
    f"compare {COUNTING} --resume": "--resume needs --out",
    f"compare {COUNTING} --preset epymar": "Did you mean epymarl?",
    f"compare {COUNTING} --preset=mappo --setup=vdn-local-shared": (
        "The preset has settings of mappo, but not of vdn."
    ),
    "compare --report nowhere": "no evaluated runs below nowhere",
    f"compare {COUNTING} --report nowhere --seeds 3 --video": (
        "--report trains nothing: omit TASK, --seeds, --video."
    ),
    f"compare {COUNTING} --workers 2 --set workers=1": (
        "--workers and --set workers= are the same: pass one."
    ),
    f"compare {COUNTING} --frames 9 --set frames=80": (
        "--frames and --set frames= are the same: pass one."
    ),
}
for _command in ("collect", "play", "render"):
    REFUSED |= {
        f"{_command} {COUNTING} --centralised": (
            "the policy is random. Omit them, or pass --policy mlp"
        ),
        f"{_command} {COUNTING} --level 2": (
            "--level 2 is that of a curriculum: add --curriculum"
        ),
        f"{_command} {COUNTING} --curriculum os:none": "has no attribute 'none'",
        f"{_command} {COUNTING} --curriculum os": "os must be module:name of a callabl",
        f"{_command} {COUNTING} --curriculum :os": ":os must be module:name of a calla",
        f"{_command} {COUNTING} --curriculum os:sep": "callable, but is '/'",
        f"{_command} {COUNTING} --curriculum os:listdir": "must take three arguments",
    }
for _command in ("info", "collect", "play", "compare"):
    REFUSED[f"{_command} simple_spread_v3 --env foo=3"] = (
        "argument 'foo' The environment was given --env foo=3. Settings of simple_sprea"
    )


@pytest.mark.processes
@pytest.mark.parametrize("command", REFUSED)
def test_a_wrong_command_is_refused_before_anything_starts(
    command: str, here: Path
) -> None:
    if "simple_" in command:
        pytest.importorskip("mpe2", reason="needs the extra mpe")
    if "/balance" in command:
        pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    if "compare" in command:
        pytest.importorskip("matplotlib", reason="needs the extra plot")
    assert REFUSED[command] in error_of(*command.split())
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["collect", "play", "render"])
def test_commands_act_at_random_unless_a_policy_is_given(command: str) -> None:
    text = output_of(command, "--help")
    assert "[default: the run's, or random]" in text


def test_envs_lists_tasks_of_every_family() -> None:
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    text = output_of("envs", "walker")
    assert "sisl/multiwalker_v9" in text
    assert "pursuit" not in text
    assert "Available tasks: 1." in text


def test_envs_lists_small_families_before_large_ones() -> None:
    text = output_of("envs")
    families = re.findall(r"(?:^| )(\w+)/\S+", text.partition(" After: ")[0])
    totals = Counter(re.findall(r"(?:^| )(\w+)/\S+", text))
    assert len(set(families)) > 1
    sizes = [totals[family] for family in families]
    assert sizes == sorted(sizes)


@pytest.mark.processes
def test_info_shows_groups_spaces_and_keys() -> None:
    text = output_of("info", COUNTING)
    description = CountingEnv().description
    for name, group in description.groups.items():
        assert f"{name} {group.n_agents}: {group.agents[0]}" in text
    assert "('next', " in text
    assert "as soon as all agents are done" in text
    assert "Box [5] float32" in text


def test_inspect_prints_a_summary_of_a_dataset(tmp_path: Path) -> None:
    collector = Collector(
        CountingEnv, frames_per_batch=50, total_frames=100, max_frames_per_traj=10
    )
    description = DatasetDescription("counting", collector.description)
    run_description = RunDescription(seed=12, policy={"kind": "random"})
    with Writer(tmp_path / "d", description, run_description) as writer:
        for batch in collector:
            writer.add(batch)
    episodes = open_dataset(tmp_path / "d").trajectories
    text = output_of("inspect", str(tmp_path / "d"), "--keys")
    assert "task counting" in text
    assert "frames 100" in text
    assert f"episodes {len(episodes)}" in text
    assert "0 100 12 20" in text
    assert "policy: kind=random" in text
    assert "('collector', 'traj_ids') [] int64" in text
    assert f"team sum {episodes.returns.mean():,.5g}" in text
    assert "Team returns" in text
    assert "Lengths in frames" in text
    lengths = episodes.lengths.tolist()
    assert f"to 10 {'█' * 40} {lengths.count(10)} " in text  # Most were truncated.
    text = error_of("inspect", str(tmp_path))
    assert "has no batches of a dataset" in text


@pytest.mark.processes
def test_inspect_writes_histograms_to_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    imread = pytest.importorskip("imageio.v3", reason="needs the extra video").imread
    record(tmp_path / "d", CountingEnv, episodes=20, seed=0)
    (_, team), *groups, _ = episode_panels(open_dataset(tmp_path / "d").trajectories)
    np.testing.assert_allclose(np.sum([values for _, values in groups], 0), team)
    picture = tmp_path / "x.png"
    text = output_of("inspect", str(tmp_path / "d"), "--plot", str(picture))
    image = imread(picture)[..., :3]
    # Four panels in two rows: team and two groups, lengths.
    assert image.shape[:2] == (720, 960)
    for panel in image.reshape(2, 360, 2, 480, 3).swapaxes(1, 2).reshape(4, -1):
        assert len(np.unique(panel)) > 20
    text = error_of("inspect", str(tmp_path / "d"), "--plot", str(tmp_path / "x.doc"))
    assert "doc" in text


def test_equal_lengths_are_one_visible_bar(tmp_path: Path) -> None:
    imread = pytest.importorskip("imageio.v3", reason="needs the extra video").imread
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    from marl_collect.cli.histograms import _plot_edges, plot_histograms

    panels = [("team return", [1.0] * 9), ("length in frames", [4.0] * 9)]
    plot_histograms(panels, "t", "episodes", tmp_path / "x.png")
    panel = imread(tmp_path / "x.png")[60:300, 540:900, :3].astype(int)
    bar = (panel[..., 2] > 150) & (panel[..., 0] < 80)  # Blue.
    assert 0.05 < bar.mean() < 0.6
    assert len(_plot_edges([1.0, 2.0, 2.0, 3.0])) <= 4
    many = np.random.default_rng(0).normal(size=2000)
    whole = [0, 60, *np.clip(5 * many + 30, 0, 60).round().tolist()]
    for values in (many.tolist(), whole):
        edges = _plot_edges(values)
        assert len(edges) <= 31
        assert edges[0] <= min(values)
        assert edges[-1] >= max(values)


@pytest.mark.processes
def test_a_dataset_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="needs the extra minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    dataset = record(tmp_path / "d", CountingEnv, episodes=3, seed=0)
    command = ("export", str(tmp_path / "d"), "--format", "minari")
    text = output_of(*command, "--out", "mine/x-v0")
    frames = len(dataset)
    assert text == f"3 episodes, {frames} frames: {tmp_path}/store/mine/x-v0 "
    assert minari.load_dataset("mine/x-v0").total_steps == frames
    text = error_of(*command, "--out", "mine/x-v0")
    assert "store/mine/x-v0 exists: export to a path that does not exist" in text
    text = error_of("export", str(tmp_path / "d"), "--format", "csv", "--out", "y-v0")
    assert "error: 'csv' is not a format of export: use minari." in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("inspect", ()),
        ("view", ("--save", "x.html", "--task", COUNTING)),
        ("export", ("--out", "mine/x-v0")),
    ],
)
def test_frames_are_decoded_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: Any
) -> None:
    if command == "export":
        pytest.importorskip("minari", reason="needs the extra minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    record_here(tmp_path / "d", CountingEnv, episodes=2)
    shutil.rmtree(tmp_path / "d" / ".cache")
    output_of(command, "d", *options, "--cache", "decoded")
    assert list((tmp_path / "decoded").glob("*/*.records"))
    assert not (tmp_path / "d" / ".cache").exists()


def test_a_vault_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore", reason="needs the extra vault")
    from support.vaults import make_arrays, write_vault

    arrays = make_arrays(1, 6)
    arrays["terminals"][0, [2, 5]] = True
    source = str(write_vault(tmp_path / "v" / "u", arrays))
    command = ("import", source, "--out", str(tmp_path / "d"))
    text = error_of(*command, "--format", "csv")
    assert "error: 'csv' is not a format of import: use vault." in text
    text = output_of(*command, "--format", "vault")
    assert text == f"2 episodes, 6 frames: {tmp_path}/d "
    assert open_dataset(tmp_path / "d").trajectories.lengths.tolist() == [3, 3]


@pytest.mark.processes
def test_a_damaged_dataset_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("minari", reason="needs the extra minari")
    path = tmp_path / "d"
    record(path, CountingEnv, episodes=3, seed=0)
    (data_file,) = path.glob("*.parquet")
    content = data_file.read_bytes()
    commands = (["export", str(path), "--out", "out-v0"], ["inspect", str(path)])
    shutil.rmtree(path / ".cache")
    middle = len(content) // 2
    for damaged in (content[:5], content[:middle] + b"\xff" + content[middle + 1 :]):
        data_file.write_bytes(damaged)
        for command in commands:
            text = error_of(*command)
            assert f"error: {data_file} cannot be read, or is damaged: " in text


def test_atari_without_roms_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("multi_agent_ale_py", reason="needs the extra atari")
    from marl_collect.envs.pettingzoo import tasks

    monkeypatch.setattr(tasks, "_missing_roms", lambda: tasks.DOWNLOAD_ROMS)
    text = output_of("envs", "atari/pong")
    assert "After: AutoROM --accept-license" in text
    assert "Available tasks: 0." in text
    text = error_of("info", "atari/pong_v3")
    assert "atari/pong_v3 needs: AutoROM --accept-license" in text


def test_envs_lists_scenarios() -> None:
    skip_without("meltingpot", "needs the extra meltingpot")
    text = output_of("envs", "clean_up")
    assert "meltingpot/clean_up_0" in text


@pytest.mark.processes
def test_info_shows_settings_and_the_time_limit() -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    text = output_of("info", "simple_spread_v3", "--env", "max_cycles=7")
    assert "time limit 7 frames (max_cycles)" in text
    assert "max_cycles 7 (given)" in text
    assert "local_ratio 0.5" in text


def test_settings_are_found_through_passed_on_keyword_arguments() -> None:
    pytest.importorskip("Box2D", reason="needs the extra pettingzoo")
    from marl_collect.cli.tasks import task_settings

    settings = task_settings("multiwalker_v9")
    assert settings["n_walkers"] == 3
    assert settings["return_state"] is False  # of PettingZooEnv
    assert task_settings("pursuit_v5")["max_cycles"] == 500
    assert task_settings("cooperative_pong_v6")["ball_speed"] == 9  # Passed on later.


def test_the_settings_of_every_pettingzoo_task_are_found() -> None:
    pytest.importorskip("Box2D", reason="needs the extra pettingzoo")
    from marl_collect.cli.tasks import available_tasks, task_settings
    from marl_collect.envs import PettingZooEnv
    from marl_collect.envs.common import defaults_of

    families = ("sisl/", "butterfly/", "classic/", "mpe/", "magent/")
    ours = set(defaults_of(PettingZooEnv))
    tasks = [n for n, needs in available_tasks().items() if not needs]
    tasks = [name for name in tasks if name.startswith(families)]
    assert len(tasks) > 10
    for name in tasks:
        assert "render_mode" in set(task_settings(name)) - ours, name


@pytest.mark.processes
def test_play_prints_the_returns_of_each_episode() -> None:
    text = output_of("play", COUNTING, "--episodes", "3", "--max-frames-per-traj", "6")
    assert "3 episodes" in text
    assert "hunter, mean" in text
    options: Any = {"max_frames_per_traj": 6, "deterministic": True}
    played = evaluate(None, CountingEnv, episodes=3, **options)
    assert f"mean {sum(played.lengths) / 3:.1f} {played.mean_team_return:,.2f}" in text
    for number, episode in enumerate(played.episodes):
        means = [np.mean(returns) for returns in episode.returns.values()]
        cells = [played.team_returns[number], *means]
        row = [str(number), str(episode.length), *(f"{cell:,.2f}" for cell in cells)]
        assert " ".join(row) in text
    assert run("play", COUNTING, "--policy", "nowhere.pt")[0] == 2


@pytest.mark.processes
def test_inspect_shows_rewards_of_frames_if_no_episode_ended(tmp_path: Path) -> None:
    imread = pytest.importorskip("imageio.v3", reason="needs the extra video").imread
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    record(tmp_path / "d", CountingEnv, frames=2, frames_per_batch=2, seed=0)
    picture, card = tmp_path / "x.png", tmp_path / "card.md"
    text = output_of(
        *("inspect", str(tmp_path / "d"), "--plot", str(picture), "--card", str(card))
    )
    dataset = open_dataset(tmp_path / "d")
    panels = dict(reward_panels(dataset))
    for group in ("hunter", "prey"):
        rewards = dataset.transitions[:]["next", group, "reward"].sum((1, 2))
        assert panels[f"Reward of {group} in a frame"] == rewards.tolist()
        assert f"Reward of {group} in a frame" in text
    assert len(np.unique(imread(picture)[:, :480, :3])) > 20
    assert card.read_text() == dataset.card()
    low = dataset.transitions.ranges()["hunter", "observation"].low
    assert f"('hunter', 'observation') [2, 5] float32 {low:,.5g}" in text


@pytest.mark.processes
def test_inspect_draws_finite_rewards(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    with Collector(CountingEnv, frames_per_batch=2, seed=0) as collector:
        batch = collector.next().clone()
        about = DatasetDescription("counting", collector.description)
    batch["next", "hunter", "reward"][0, 0, 0] = float("nan")
    with Writer(tmp_path / "d", about) as writer:
        writer.add(batch)
    panels = dict(reward_panels(open_dataset(tmp_path / "d")))
    finite = batch["next", "hunter", "reward"][0, 1].sum().item()
    assert panels["Reward of hunter in a frame"] == [finite]
    picture = tmp_path / "x.png"
    output_of("inspect", str(tmp_path / "d"), "--plot", str(picture))
    assert picture.exists()
