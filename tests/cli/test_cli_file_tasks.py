"""What a run folder or a dataset says of a task leads to no code and to no files."""

import json
import re
import shlex
import shutil
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.commands import error_of, output_of, run
from support.datasets import record_here
from support.runs import SHORT, flags
from workloads.counting import CountingEnv

from marl_collect.cli import view
from marl_collect.cli.file_tasks import UntrustedTaskError, checked_task
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.runs import what_to_play
from marl_collect.cli.viewer import server
from marl_collect.programs.task_providers import providers
from marl_collect.storage import open_dataset

LAB2D = "lab2d/commons_harvest"
LEVEL = 'os.execute("touch {}")\nerror("It ran.")\n'


def write_run(folder: Path, task: str, env_kwargs: Any, **options: Any) -> Path:
    """Write the folder of a run that somebody else made."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("best.pt", "last.pt"):
        (folder / "checkpoints" / name).touch()
    config = {
        "task": task,
        "env_kwargs": env_kwargs,
        "setup": "ippo-local-shared",
        "seed": 0,
        "options": {"frames": 10, **options},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def proof(here: Path) -> Path:
    """Return the file that every exploit would create."""
    return here / "proof"


@pytest.fixture
def command(tmp_path: Path, proof: Path) -> Path:
    """Return the folder of a run whose task is a command of the shell."""
    return write_run(
        tmp_path / "run", "os:system", {"command": f"touch {shlex.quote(str(proof))}"}
    )


@pytest.fixture
def lua(tmp_path: Path, proof: Path) -> dict[str, Any]:
    """Return settings with which a registered task runs Lua of a downloaded folder."""
    pytest.importorskip("dmlab2d")
    level = tmp_path / "levels" / "commons_harvest"
    level.mkdir(parents=True)
    (level / "init.lua").write_text(LEVEL.format(proof))
    return {"settings": {"levelDirectory": str(level.parent), "numPlayers": 2}}


COMMANDS = [
    ["play", "RUN"],
    ["play", "RUN", "--policy=random"],
    ["render", "RUN", "--out=x.gif"],
    ["collect", "RUN", "--frames=1"],
    ["play", "TASK", "--policy", "RUN"],
    ["play", "TASK", "--policy", "RUN/checkpoints/best.pt"],
    ["render", "TASK", "--policy", "RUN/checkpoints/last.pt", "--out=x.gif"],
    ["collect", "TASK", "--policy", "RUN", "--frames=1"],
]


def completed(arguments: Sequence[str], task: str, folder: Path) -> list[str]:
    return [
        a.replace("RUN", str(folder)).replace("TASK", task)  # In this order.
        for a in arguments
    ]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_task_of_a_run_is_no_code_that_was_not_typed(
    arguments: list[str], command: Path, proof: Path
) -> None:
    # A typed task gets no settings of the run either: its code may do anything with
    # them.
    text = error_of(*completed(arguments, "os:system", command))
    assert not proof.exists()
    assert not list(proof.parent.glob("x.gif"))
    assert not Path("runs").exists()
    setting = shlex.quote(f"command={json.dumps(f'touch {proof}')}")
    assert f"--env {setting}" in text
    if arguments[1] == "RUN":
        policy = "random" if "--policy=random" in arguments else command
        assert f"pass os:system as TASK, with --policy {policy} --env" in text


def test_what_the_error_advises_plays_the_run(command: Path, proof: Path) -> None:
    _, text = run("play", command, "--policy=random")
    (advice,) = re.findall(r"pass (.*)\. $", text)
    advice = advice.replace("as TASK, with ", "")
    played = what_to_play(
        *("os:system", PolicyRequest("random", False, True, 0)),
        [shlex.split(advice)[-1]],
        None,
    )
    assert played.task == "os:system"
    assert played.env_kwargs == {"command": f"touch {proof}"}


@pytest.mark.processes
def test_resuming_takes_no_task_from_the_folder(command: Path, proof: Path) -> None:
    task = "workloads.counting:CountingEnv"
    before = sorted(command.rglob("*"))
    text = error_of("compare", task, "--resume", "--out", command, "--frames=10")
    assert "a run of another task: env_kwargs.command" in text
    assert not proof.exists()
    assert sorted(command.rglob("*")) == before


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_settings_of_a_run_lead_to_no_folder(
    arguments: Any, lua: Any, proof: Path
) -> None:
    folder = write_run(proof.parent / "run", LAB2D, lua)
    text = error_of(*completed(arguments, LAB2D, folder))
    assert "may lead to files or code: settings.levelDirectory. If" in text
    assert f"add --env {shlex.quote('settings=' + json.dumps(lua['settings']))}" in text
    assert not proof.exists()


@pytest.mark.processes
def test_typed_settings_of_this_exploit_run_it(
    lua: dict[str, Any], proof: Path
) -> None:
    error_of("info", LAB2D, f"--env=settings={json.dumps(lua['settings'])}")
    assert proof.exists()


@pytest.fixture
def data(tmp_path: Path, lua: dict[str, Any]) -> Path:
    """Return a dataset whose task is drawn by Lua of a downloaded folder."""
    folder = tmp_path / "data"
    record_here(folder, CountingEnv, episodes=2, task=LAB2D, env_kwargs=lua)
    return folder


def picture_of(folder: Path, **options: Any) -> str:
    """Ask the server of ``view`` for a picture; return why there is none."""
    with ExitStack() as stack:
        shown = stack.enter_context(closing(view._episodes(folder, None, **options)))
        viewer = server.Viewer({"/picture": shown.picture}, 0)
        running = stack.enter_context(viewer)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        address = running.address.replace("/?", "/picture?")
        try:
            request = f"{address}&number=0&source=0&frame=0"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            with refused.value as error:
                return str(json.loads(error.read())["error"])
        finally:
            running.shutdown()
            thread.join()


def test_a_dataset_that_is_viewed_runs_no_lua(data: Path, proof: Path) -> None:
    why = picture_of(data)
    assert not proof.exists()
    assert "The episodes are not drawn." in why
    assert "settings.levelDirectory" in why


def test_a_saved_page_runs_no_lua(data: Path, proof: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    output_of("view", data, "--save", file)
    assert not proof.exists()
    assert "The episodes are not drawn." in file.read_text()
    assert '"/picture?' not in file.read_text()


def test_typed_tasks_get_safe_settings(data: Path, proof: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    for task in (LAB2D, "workloads.counting:CountingEnv"):
        text = error_of("view", data, "--save", file, "--task", task)
        assert f"settings for {task} that may lead to files or code" in text
    assert not proof.exists()
    assert not file.exists()


def test_typed_settings_have_priority(data: Path, proof: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    output_of("view", data, "--save", file, "--env=settings={}")
    # dmlab2d's own level was built, whose groups are not what was recorded.
    assert "are not drawn" not in file.read_text()
    assert not proof.exists()


def test_a_dataset_of_code_is_not_drawn(tmp_path: Path, proof: Path) -> None:
    data = tmp_path / "data"
    settings = {"command": f"touch {proof}"}
    record_here(data, CountingEnv, episodes=1, task="os:system", env_kwargs=settings)
    why = picture_of(data)
    assert "add --task os:system --env" in why
    assert not proof.exists()


def test_plain_settings_of_a_run_are_used(tmp_path: Path) -> None:
    pytest.importorskip("mpe2")
    settings = {"N": 2, "max_cycles": 7, "agent_ids": True}
    task, limit = "simple_spread_v3", {"max_frames_per_traj": 3}
    folder = write_run(tmp_path / "run", task, settings, **limit)
    for task in (str(folder), "simple_spread_v3"):
        policy = PolicyRequest(str(folder), False, True, 0)
        for typed, expected in ((None, 3), (9, 9)):
            played = what_to_play(task, policy, ["N=4"], typed)
            assert played.task == "simple_spread_v3"
            assert played.policy.source == str(folder)
            assert played.env_kwargs == settings | {"N": 4}
            assert played.max_frames_per_traj == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", 3),
        ("env_kwargs", ["levelDirectory"]),
        ("options", None),
        ("options", {"max_frames_per_traj": "7"}),
        ("options", {"max_frames_per_traj": 0}),
    ],
)
def test_damaged_settings_are_errors(tmp_path: Path, name: str, value: Any) -> None:
    folder = write_run(tmp_path / "run", "simple_spread_v3", {})
    config = json.loads((folder / "config.json").read_text()) | {name: value}
    (folder / "config.json").write_text(json.dumps(config))
    text = error_of("play", folder, "--policy=random")
    assert "config.json is damaged" in text


SAFE = [
    (LAB2D, "dmlab2d", {"settings": {"numPlayers": 2}, "observations": ["RGB"]}),
    (LAB2D, "dmlab2d", {"settings": {"simulation": {"mapName": "default"}}}),
    (LAB2D, "dmlab2d", {"settings": {}, "group_map": {"a": ["player_0"]}}),
    ("meltingpot/coins", "meltingpot", {"roles": ["default"] * 2, "world_rgb": True}),
    ("multiwalker_v9", "pettingzoo", {"n_walkers": 2, "agent_ids": True}),
    ("simple_spread_v3", "mpe2", {"N": 2, "group_map": {"a": ["agent_0"]}}),
    ("openspiel/goofspiel", "pyspiel", {"num_cards": 4, "points_order": "random"}),
    ("overcooked/cramped_room", "overcooked_ai_py", {"shaping": 1.0, "horizon": 9}),
    ("vmas/navigation", "vmas", {"num_envs": 4, "n_agents": 3, "max_steps": None}),
    ("mamujoco/HalfCheetah-6x1", "gymnasium_robotics", {"agent_obsk": 0}),
    ("rware/rware-tiny-2ag-v2", "rware", {"reward_type": "global", "max_steps": 9}),
    (
        "lbforaging/Foraging-8x8-2p-3f-v3",
        "lbforaging",
        {"field_size": [9, 9], "max_num_food": 1, "max_food_level": None},
    ),
    ("jaxmarl/SMAX", "jaxmarl", {"scenario": "3m", "num_envs": 8}),
]


@pytest.mark.parametrize(("task", "module", "settings"), SAFE)
def test_safe_settings_pass(task: str, module: str, settings: dict[str, Any]) -> None:
    pytest.importorskip(module)
    chosen = checked_task("file", task, settings, {}, how=str)
    assert chosen == (task, settings)


UNSAFE = [
    (LAB2D, "dmlab2d", {"settings": {"levelDirectory": 5}}, "settings.levelDirectory"),
    (LAB2D, "dmlab2d", {"settings": {"new": "x"}}, "settings.new"),
    (LAB2D, "dmlab2d", {"settings": "x"}, "settings"),
    (LAB2D, "dmlab2d", {"settings": {"a.levelDirectory": "x"}}, "settings.a.level"),
    ("meltingpot/coins", "meltingpot", {"substrate": "x"}, "substrate"),
    ("pursuit_v5", "pettingzoo", {"evader_controller": "x"}, "evader_controller"),
    ("multiwalker_v9", "pettingzoo", {"n_walkers": "/etc"}, "n_walkers"),
    ("multiwalker_v9", "pettingzoo", {"unknown": 1}, "unknown"),
    ("openspiel/bargaining", "pyspiel", {"instances_file": "/x"}, "instances_file"),
    ("openspiel/colored_trails", "pyspiel", {"boards_file": "/x"}, "boards_file"),
    ("vmas/road_traffic", "vmas", {"map_file_path": "/x"}, "map_file_path"),
    ("mamujoco/Ant-2x4", "gymnasium_robotics", {"xml_file": "/x"}, "xml_file"),
    ("mamujoco/Ant-2x4", "gymnasium_robotics", {"gym_env": "/x"}, "gym_env"),
]


@pytest.mark.parametrize(("task", "module", "settings", "name"), UNSAFE)
def test_a_family_does_not_declare_other_settings_safe(
    task: str, module: str, settings: dict[str, Any], name: str
) -> None:
    pytest.importorskip(module)
    with pytest.raises(UntrustedTaskError, match=f"files or code: {name}"):
        checked_task("file", task, settings, {}, how=str)
    assert checked_task("file", task, settings, settings, how=str) == (task, settings)


def test_undeclared_settings_must_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Provider:
        def find_task(self, task: str) -> Any:
            del task
            return CountingEnv

    monkeypatch.setattr("marl_collect.cli.tasks.providers", lambda: [Provider()])
    assert checked_task("file", "theirs", {}, {}, how=str) == ("theirs", {})
    with pytest.raises(UntrustedTaskError, match="files or code: size"):
        checked_task("file", "theirs", {"size": 1}, {}, how=str)


NOT_SAFE = {
    "action_spaces",
    "agent_factorization",
    "agents",
    "auto_rom_install_path",
    *("betting", "bettingAbstraction", "blind", "boardCards", "firstPlayer"),
    *("handReaches", "maxRaises", "numBoardCards", "raiseSize", "stack"),
    "boards_file",
    "env_name",
    "evader_controller",
    "gym_env",
    "initial_state_buffer",
    "instances_file",
    "landmarks",
    "observation_spaces",
    "op_ingredient_permutations",
    "pursuer_controller",
    "settings",
}
"""Arguments that files do not choose: paths, objects, and texts that few need."""


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("lab2d", "dmlab2d"),
        ("lbforaging", "lbforaging"),
        ("mamujoco", "gymnasium_robotics"),
        ("meltingpot", "meltingpot"),
        ("openspiel", "pyspiel"),
        ("overcooked", "overcooked_ai_py"),
        ("rware", "rware"),
        ("vmas", "vmas"),
        ("atari", "multi_agent_ale_py"),
        ("butterfly", "pettingzoo"),
        ("classic", "rlcard"),
        ("magent", "magent2"),
        ("mpe", "mpe2"),
        ("sisl", "Box2D"),
    ],
)
def test_every_argument_is_safe_or_known_not_to_be(family: str, module: str) -> None:
    pytest.importorskip(module)
    unknown = {}
    (provider,) = (
        p
        for p in providers()
        if any(name.startswith(f"{family}/") for name in p.available_tasks())
    )
    checks: Any = provider
    tasks = [n for n in provider.available_tasks() if n.startswith(f"{family}/")]
    for task in tasks if len(tasks) < 100 else tasks[:3]:
        for name, default in checks.settings(task).items():
            texts = default is None or isinstance(default, str)
            if not checks.is_safe(task, name, "text" if texts else default):
                unknown[name] = default
    assert {name for name in unknown if not _is_object(unknown[name])} <= NOT_SAFE


def _is_object(default: Any) -> bool:
    return type(default).__module__ != "builtins"


TASK = "simple_spread_v3"
SETTINGS = SHORT | {"max_frames_per_traj": 5, "ppo.epochs": 1}


def acting(source: str = "") -> PolicyRequest:
    return PolicyRequest(source, centralised=False, share_params=True, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison with one run, whose settings are its own."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("mpe2")
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["--frames=40", "--seeds=1", "--workers=1", "--setup=ippo-local-shared"]
    arguments += ["--env=N=2", "--env=max_cycles=30"]
    output_of("compare", TASK, *arguments, *flags(SETTINGS), "--out", str(folder))
    return folder


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_settings_of_a_run_of_another_task_are_not_used(trained: Path) -> None:
    played = what_to_play("other", acting(str(trained)), ["a=1"], None)
    assert (played.env_kwargs, played.max_frames_per_traj) == ({"a": 1}, None)
    played = what_to_play("other", acting(), None, None)
    assert played.policy.source == "random"


@pytest.mark.processes
def test_collect_writes_data_of_a_run(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    output_of("collect", str(trained), "--frames=40", "--out", str(out), "--quiet")
    assert max(open_dataset(out).trajectories.lengths) == 5


@pytest.mark.processes
def test_a_folder_with_the_name_of_a_task_is_not_taken_for_it(
    trained: Path, here: Path
) -> None:
    shutil.copytree(trained, here / "simple_tag_v3")
    (here / "random").mkdir()
    for policy, expected in (("", "random"), ("mlp", "mlp")):
        play = what_to_play("simple_tag_v3", acting(policy), None, None)
        assert (play.task, play.policy.source) == ("simple_tag_v3", expected)
    play = what_to_play("./simple_tag_v3", acting(), None, None)
    assert play.task == TASK
