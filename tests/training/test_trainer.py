"""Training runs: results, files, exact resuming, and policies that act as before."""

import json
import logging
import os
import re
import shutil
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torch import nn

pytest.importorskip("pettingzoo")

from support.runs import StopAt, StopError, short
from workloads.counting import CountingEnv
from workloads.pair import PairEnv

from marl_collect import describe, evaluate
from marl_collect.cli.policies import PolicyRequest
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.models import MultiAgentConvNet, load_policy, make_policy, save_policy
from marl_collect.models.saved_policy import BEST, CONFIG
from marl_collect.programs.interruption import Interruption
from marl_collect.training import checkpoint, comparison
from marl_collect.training.comparison import Comparison, check_setups, measure_random
from marl_collect.training.evaluating import FINAL_SEED as SEED
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.options import Setup, TrainingOptions, policy_options
from marl_collect.training.results import RANDOM, read_random
from marl_collect.training.run_folder import EVALUATIONS, LAST, PROGRESS, RunFolder
from marl_collect.training.trainer import Task, Trainer, make_learner

pytestmark = pytest.mark.processes


def pair(*, continuous: bool = False) -> Any:
    return PettingZooWrapper(PairEnv("crossed", continuous=continuous))


def task_of(factory: Any, name: str = "task") -> Any:
    return Task(name, factory, describe(factory), {})


COUNTING = short(
    {
        "frames": 240,
        "eval_interval": 90,  # Not a multiple of a batch: resuming must not shift it.
        "final_episodes": 4,
        "threads": 1,
        "ppo.epochs": 2,
        "ppo.minibatch_frames": 16,
        "value.warm_up_frames": 40,
        "value.minibatch_frames": 8,
        "value.minibatch_episodes": 3,
        "value.frames_per_update": 10,
        "value.epsilon_frames": 100,  # So that actions depend on the weights.
        # A batch in progress at a checkpoint would be collected with newer weights.
        "value.prefetch": False,
    }
)
HUNTERS = partial(CountingEnv, n_prey=0)
equal = partial(torch.testing.assert_close, rtol=0, atol=0)


class SignalAt(StopAt):
    """Sends a signal after a batch was trained on, or in an evaluation."""

    def __init__(self, number: int, frames: int, *, evaluation: bool) -> None:
        super().__init__(frames)
        self.number = number
        self.evaluation = evaluation
        self.told = 0
        self.goes_on = False

    def progress(self, frames: int, row: dict[str, float]) -> None:
        if frames == self.frames and not self.evaluation:
            os.kill(os.getpid(), self.number)
            self.goes_on = True

    def evaluated(self, record: EvaluationRecord) -> None:
        if record.frames == self.frames and self.evaluation:
            os.kill(os.getpid(), self.number)
            self.goes_on = True

    def interrupted(self) -> None:
        self.told += 1


@pytest.mark.parametrize(
    ("name", "settings", "end"),
    [
        (
            *("mappo-local-own-ids", {"recurrent": "gru", "standardise_rewards": True}),
            "a signal in a batch",
        ),
        (
            "mappo-centralised-shared",
            {"network": "attention", "last_action": True},
            "a signal in an evaluation",
        ),
        (
            *("ippo-local-shared", {"ppo.episodes_per_batch": 4, "recurrent": "gru"}),
            "an error",
        ),
        ("qmix-centralised-own", {"network": "attention"}, "an error"),
        (
            "iql-local-shared-ids",
            {"recurrent": "gru", "standardise_rewards": True},
            "a signal in an evaluation",
        ),
        (
            *("vdn-local-shared", {"recurrent": "lstm", "last_action": True}),
            "a signal in a batch",
        ),
        ("maddpg-local-own", {"standardise_rewards": True}, "an error"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, settings: Any, end: str, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "marl_collect")
    setup = Setup.parse(name)
    task = task_of(NUMBERS if setup.algorithm == "maddpg" else HUNTERS)
    options = COUNTING.with_settings(settings)
    straight, stopped = (RunFolder(tmp_path / name) for name in ("straight", "stopped"))
    whole = Trainer(task, setup, options, 3, straight.path).run()
    if end == "an error":
        frames = 200
        with pytest.raises(StopError):
            Trainer(task, setup, options, 3, stopped.path, StopAt(frames)).run()
    else:
        evaluation = "evaluation" in end
        frames = 120 if evaluation else 160
        number = signal.SIGTERM if evaluation else signal.SIGINT
        watcher = SignalAt(number, frames, evaluation=evaluation)
        with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
            Trainer(task, setup, options, 3, stopped.path, watcher, interruption).run()
        assert watcher.told == (0 if evaluation else 1)
        assert watcher.goes_on  # As loggers must, or they could wait for ever.
        assert stopped.read_checkpoint(LAST)["rows"] == frames // 40
    assert not (stopped.path / "result.json").exists()
    if options.ppo.episodes_per_batch is None:
        rows = [row["frames"] for row in stopped.rows()]
        assert rows == [*range(40, frames + 1, 40)]
    resumed = Trainer(task, setup, options, 3, stopped.path).run()
    (message,) = [m for m in caplog.messages if m.startswith("Resumed ")]
    assert re.fullmatch(rf"Resumed {stopped.path} at [1-9]\d+ frames.", message)
    for record in ("best", "last"):
        assert resumed[record] == whole[record]
    checkpoints = [folder.read_checkpoint(LAST) for folder in (straight, stopped)]
    assert checkpoints[0]["windows"] == checkpoints[1]["windows"]
    equal(*(checkpoint["learner"]["networks"] for checkpoint in checkpoints))
    skipped = {"seconds_collecting", "seconds_training", "seconds_evaluating"}
    tables = [
        [{k: v for k, v in row.items() if k not in skipped} for row in folder.rows()]
        for folder in (straight, stopped)
    ]
    assert str(tables[0]) == str(tables[1])  # As text, because NaN != NaN.


class Costly(CountingEnv):  # type: ignore[misc]
    """Each step costs 10 ms of CPU time; a file tells that of the process so far."""

    def __init__(self, folder: Path) -> None:
        super().__init__(n_prey=0)
        self.folder = folder

    def step_row(self) -> None:
        begin = time.process_time()
        while time.process_time() - begin < 0.01:
            pass
        (self.folder / str(os.getpid())).write_text(str(time.process_time()))
        super().step_row()


def test_the_cpu_seconds_of_a_run_include_its_workers_and_what_came_before(
    tmp_path: Path,
) -> None:
    costs, folder = tmp_path / "costs", RunFolder(tmp_path / "run")
    costs.mkdir()
    task = task_of(partial(Costly, costs))
    options = COUNTING.with_settings({"frames": 120, "eval_interval": 40})
    with pytest.raises(StopError):
        Trainer(task, IPPO, options, 3, folder.path, StopAt(80)).run()
    state = folder.read_checkpoint(LAST)
    assert 0 < state["cpu_seconds"] < 1000
    folder.write_checkpoint(LAST, state | {"cpu_seconds": 1000.0})
    for path in costs.iterdir():
        path.unlink()
    before = time.process_time()
    spent = Trainer(task, IPPO, options, 3, folder.path).run()["cpu_seconds"] - 1000
    own = time.process_time() - before
    workers = sum(float(path.read_text()) for path in costs.iterdir())
    assert workers > 0.5
    assert spent == pytest.approx(own + workers, rel=0.2)


def test_runs_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checkpoint_of(name: str) -> Any:
        Trainer(task_of(HUNTERS), IPPO, COUNTING, 3, tmp_path / name).run()
        return torch.load(tmp_path / name / LAST)

    alone = checkpoint_of("alone")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    started = checkpoint_of("started by torchrun")
    equal(alone["networks"], started["networks"])


def test_runs_are_saved_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    write = RunFolder.write_checkpoint

    def write_checkpoint(folder: RunFolder, name: str, state: Any) -> None:
        write(folder, name, state)
        if name == LAST:
            saved.append(state["rows"])

    monkeypatch.setattr(RunFolder, "write_checkpoint", write_checkpoint)
    setup = Setup.parse("ippo-local-shared")
    Trainer(task_of(HUNTERS), setup, COUNTING, 0, tmp_path / "a").run()
    assert saved == [3, 3, 5, 5, 6, 6]  # Before and after each evaluation.
    saved.clear()
    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 0.0)
    Trainer(task_of(HUNTERS), setup, COUNTING, 0, tmp_path / "b").run()
    assert sorted({*saved}) == [1, 2, 3, 4, 5, 6]


NUMBERS = partial(pair, continuous=True)
BEST_REWARD = {
    "ippo-local-shared": 0.5,
    "mappo-centralised-shared": 0.75,
    "mappo-centralised-own": 1.0,
    "qmix-centralised-own": 1.0,
    "maddpg-centralised-shared": 0.875,
    "maddpg-centralised-own": 1.0,
    "iddpg-centralised-own": 0.75,  # Its critics see no bit of the other agent.
}


@pytest.mark.parametrize("name", BEST_REWARD)
def test_training_reaches_the_optimum_of_its_setup(name: str, tmp_path: Path) -> None:
    """PairEnv's module derives the optima, which hold for deterministic actions."""
    options = TrainingOptions().with_settings(
        {
            "frames": 6_000,
            "frames_per_batch": 500,
            "workers": 1,
            "envs_per_worker": 4,
            "gamma": 0.0,
            "num_cells": [16],
            "eval_interval": 6_000,
            "eval_episodes": 4,
            "final_episodes": 400,
            "threads": 1,
            "ppo.lr": 0.02,
            "ppo.epochs": 4,
            "ppo.minibatch_frames": 250,
            "value.lr": 0.005,
            "value.warm_up_frames": 500,
            "value.epsilon_frames": 3_000,
            "value.frames_per_update": 25,
        }
    )
    ddpg = "ddpg" in name
    if ddpg:
        options = options.with_settings(
            {
                "value.noise": 1.0,
                "value.policy_lr": 0.002,
                "value.action_penalty": 0.01,
                "value.frames_per_update": 10,
            }
        )
    task = task_of(NUMBERS if ddpg else pair)
    result = Trainer(task, Setup.parse(name), options, 0, tmp_path).run()
    returns = result["last"]["team_returns"]
    per_agent = sum(returns) / len(returns) / 2
    assert per_agent == pytest.approx(BEST_REWARD[name], abs=0.03 if ddpg else 0.08)


IPPO = Setup.parse("ippo-local-own")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of a finished run, and its result."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, Trainer(task_of(CountingEnv), IPPO, COUNTING, 0, folder).run()


@pytest.fixture
def finished(finished_run: tuple[Path, Any], tmp_path: Path) -> tuple[Path, Any]:
    """Return a copy of the folder of a finished run, and the run's result."""
    folder, result = finished_run
    return Path(shutil.copytree(folder, tmp_path / "run")), result


def test_a_run_writes_all_its_files(finished: tuple[Path, Any]) -> None:
    pytest.importorskip("tensorboardX")
    folder, result = finished
    trainer = Trainer(task_of(CountingEnv), IPPO, COUNTING, 0, folder)
    assert trainer.run() == result  # Read from the folder.
    config = json.loads((folder / CONFIG).read_text())
    assert config["setup"] == IPPO.name
    assert config["options"] == json.loads(json.dumps(asdict(COUNTING)))
    evaluations = json.loads((folder / "evaluations.json").read_text())
    assert [e["frames"] for e in evaluations] == [0, 120, 200, 240]
    assert {len(e["team_returns"]) for e in evaluations} == {2}
    assert len(result["best"]["team_returns"]) == 4
    policy = RunFolder(folder).read_checkpoint(BEST)["networks"]["policy"]
    assert result["policy_parameters"] == sum(w.numel() for w in policy.values())
    networks = RunFolder(folder).read_checkpoint(BEST)["networks"]
    assert set(networks) == {"policy", "critic"}
    assert list(folder.glob("events.out.tfevents.*"))


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    task = task_of(CountingEnv)
    options = asdict(COUNTING) | {"gamma": 0.5}
    config = {"task": task.name, "env_kwargs": {}, "setup": IPPO.name}
    folder.write_json(CONFIG, config | {"seed": 1, "options": options})
    folder.write_checkpoint(LAST, {})
    differences = (
        f"gamma is 0.5 there and {COUNTING.gamma} here; seed is 1 there and 0 here"
    )
    with pytest.raises(ValueError, match=re.escape(f"settings: options.{differences}")):
        Trainer(task, IPPO, COUNTING, 0, tmp_path).run()


def test_old_runs_have_new_defaults(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    task = task_of(CountingEnv)
    config = json.loads((folder / CONFIG).read_text())
    for part, name in ((None, "bootstrap_limits"), ("ppo", "popart")):
        del (config["options"] if part is None else config["options"][part])[name]
    (folder / CONFIG).write_text(json.dumps(config))
    assert Trainer(task, IPPO, COUNTING, 0, folder).run() == result
    other = COUNTING.with_settings({"ppo.popart": True, "ppo.normalise_values": True})
    with pytest.raises(ValueError, match=r"popart is False there and True here"):
        Trainer(task, IPPO, other, 0, folder).run()


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    task = task_of(CountingEnv)
    with pytest.raises(StopError):
        Trainer(task, IPPO, COUNTING, 0, tmp_path, StopAt(200)).run()
    names = (LAST, CONFIG, BEST, PROGRESS)
    contents = {name: (tmp_path / name).read_bytes() for name in names}
    for name, content in (
        (LAST, b""),
        (LAST, contents[LAST][: len(contents[LAST]) // 2]),
        (LAST, contents[BEST]),
        (CONFIG, b"{"),
        (CONFIG, b"[]"),
        (CONFIG, b"\xff"),
        (CONFIG, None),
        (BEST, None),
        (BEST, b"no tensors"),
        (PROGRESS, None),
        (PROGRESS, b""),
        (PROGRESS, b"\xff\n"),
    ):
        for other, text in contents.items():
            (tmp_path / other).write_bytes(text)
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
        # Before any frame is collected: otherwise StopAt would raise its own error.
        with pytest.raises(ValueError, match=f"{tmp_path / name} is (damaged|missing)"):
            Trainer(task, IPPO, COUNTING, 0, tmp_path, StopAt(0)).run()


def test_the_checkpoint_restores_evaluations(finished: tuple[Path, Any]) -> None:
    folder, _ = finished
    before = (folder / EVALUATIONS).read_text()
    (folder / EVALUATIONS).write_text("")
    (folder / "result.json").unlink()
    Trainer(task_of(CountingEnv), IPPO, COUNTING, 0, folder).run()
    assert (folder / EVALUATIONS).read_text() == before


def test_untrained_weights_are_never_the_best(tmp_path: Path) -> None:
    settings = {"reward_scale": -1.0, "ppo.lr": 0.05, "gamma": 0.0}  # Learns to lose.
    options = COUNTING.with_settings(settings | {"eval_episodes": 100})
    setup = Setup.parse("mappo-centralised-own")
    result = Trainer(task_of(pair), setup, options, 0, tmp_path).run()
    windows = torch.load(tmp_path / LAST, weights_only=False)["windows"]
    untrained, *trained = [EvaluationRecord(**window) for window in windows]
    assert untrained.team > max(record.team for record in trained)
    assert result["best"]["frames"] > 0
    assert torch.load(tmp_path / BEST)["frames"] == result["best"]["frames"]


def test_of_equal_evaluations_the_newest_weights_are_the_best(tmp_path: Path) -> None:
    pytest.importorskip("pygame", reason="needs the extra pettingzoo")
    game = partial(PettingZooEnv, "rps_v2", max_cycles=5)  # Its returns sum to zero.
    setup = Setup("ippo")
    Trainer(task_of(game), setup, COUNTING, 0, tmp_path).run()
    saved = torch.load(tmp_path / BEST)
    last = torch.load(tmp_path / LAST, weights_only=False)
    assert saved["frames"] == last["windows"][-1]["frames"] >= COUNTING.frames
    equal(saved["networks"]["policy"], last["networks"]["policy"])


def test_the_learning_rate_is_never_negative(tmp_path: Path) -> None:
    options = COUNTING.with_settings({"frames": 50, "ppo.anneal": True})
    Trainer(task_of(CountingEnv), IPPO, options, 0, tmp_path).run()
    first, last = (row["lr"] for row in RunFolder(tmp_path).rows())
    assert first == pytest.approx(options.ppo.lr * 0.2)
    assert last == 0.0


def test_a_run_resumes_without_the_file_of_its_initial_weights(tmp_path: Path) -> None:
    task, initial = task_of(HUNTERS), tmp_path / "initial.pt"
    policy = policy_options(IPPO, COUNTING, task.description)
    save_policy(initial, make_policy(HUNTERS, **policy), HUNTERS, **policy)
    options = COUNTING.with_settings({"initial": str(initial)})
    runs = Comparison(task, [IPPO], [0], options, tmp_path)
    with pytest.raises(StopError):
        Trainer(task, IPPO, options, 0, runs.path(IPPO, 0), StopAt(200)).run()
    initial.unlink()
    check_setups(runs)
    assert Trainer(task, IPPO, options, 0, runs.path(IPPO, 0)).run()["best"]
    with pytest.raises(FileNotFoundError, match=r"initial\.pt is neither.*marl-collec"):
        check_setups(replace(runs, seeds=[0, 1]))


def test_a_run_that_failed_before_its_checkpoint_begins_again(tmp_path: Path) -> None:
    task = task_of(CountingEnv)
    with pytest.raises(StopError):
        Trainer(task, IPPO, COUNTING, 0, tmp_path, StopAt(40)).run()
    assert (tmp_path / CONFIG).exists()
    (tmp_path / RANDOM).write_text("{}")  # It may be of another task.
    measure_random(Comparison(task, [IPPO], [0], COUNTING, tmp_path))
    assert read_random(tmp_path)
    changed = COUNTING.with_settings({"gamma": 0.5})
    Trainer(task, IPPO, changed, 0, tmp_path).run()
    assert json.loads((tmp_path / CONFIG).read_text())["options"]["gamma"] == 0.5


def test_a_video_has_the_options_of_its_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Mock()
    monkeypatch.setattr(comparison, "play", play)
    for name in ("Trainer", "load_policy", "write_video", "measure_random"):
        monkeypatch.setattr(comparison, name, Mock())
    options = {"ippo": COUNTING.with_settings({"max_frames_per_traj": 7})}
    runs = Comparison(task_of(CountingEnv), [IPPO], [0], COUNTING, tmp_path)
    runs.path(IPPO, 0).mkdir(parents=True)
    comparison.run_all(
        replace(runs, video=CountingEnv, algorithm_options=options), Mock()
    )
    assert play.call_args.kwargs["max_frames_per_traj"] == 7


MASKED = partial(CountingEnv, n_prey=0, image=(32, 32, 3), action_mask=True)
BRIEF = short({"frames": 40, "ppo.epochs": 1, "value.warm_up_frames": 0})


@pytest.mark.parametrize(
    ("name", "recurrent", "dtype"),
    [
        ("mappo-local-own", "gru", "bfloat16"),
        ("ippo-centralised-shared-ids", None, "float32"),
        ("qmix-local-own", None, "float32"),
        ("qmix-local-shared", "gru", "bfloat16"),
    ],
)
def test_a_run_s_policy_acts_as_it_did_and_training_goes_on(
    name: str, recurrent: bool, dtype: str, tmp_path: Path
) -> None:
    task = Task("task", MASKED, describe(MASKED), {})
    options = BRIEF.with_settings({"recurrent": recurrent, "conv_dtype": dtype})
    setup = Setup.parse(name)
    tmp_path /= "seed_0"
    result = Trainer(task, setup, options, 0, tmp_path).run()
    for path in (tmp_path, tmp_path / BEST):
        policy = load_policy(path, MASKED)
        evaluation = evaluate(
            policy, MASKED, episodes=2, num_workers=1, envs_per_worker=2, seeds=SEED
        )
        returns = pytest.approx(evaluation.team_returns, rel=1e-5)
        assert result["best"]["team_returns"] == returns
    convolutions = [m for m in policy.modules() if isinstance(m, MultiAgentConvNet)]
    assert {str(net.dtype) for net in convolutions} == {f"torch.{dtype}"}
    last = load_policy(tmp_path / LAST, MASKED).state_dict()
    assert last.keys() == policy.state_dict().keys()
    same(load_policy(tmp_path.parent, MASKED), policy)  # The only run in there.
    acting = PolicyRequest(str(tmp_path), False, True, 0)
    acting.check()
    recorded = acting.describe()
    assert recorded["sha256"]
    assert recorded["checkpoint"] == str(tmp_path / BEST)
    assert recorded["kind"] == "saved"
    assert recorded["centralised"] is setup.centralised
    assert recorded["recurrent"] == recurrent
    same(acting.build(task.description), policy)
    parent = PolicyRequest(str(tmp_path.parent), False, True, 0)
    assert parent.describe() == acting.describe()
    going_on = options.with_settings({"initial": str(tmp_path)})
    begun = make_learner(task.description, setup, going_on, 5).policy
    for key, value in begun.state_dict().items():
        if key.endswith("epsilon"):  # It explores anew, as its own options say.
            assert value == options.value.epsilon_start > policy.state_dict()[key]
            policy.state_dict()[key].copy_(value)
    same(begun, policy)
    other = "vdn-local-shared" if name.startswith("qmix") else "ippo-local-shared"
    with pytest.raises(ValueError, match=f"in {tmp_path / BEST} does not fit"):
        make_learner(task.description, Setup.parse(other), going_on, 5)
    relu = going_on.with_settings({"activation": "relu"})
    with pytest.raises(ValueError, match=r"it has .*Tanh.*, but the setup has .*ReLU"):
        make_learner(task.description, setup, relu, 5)
    masks = describe(partial(MASKED, action_mask=False))
    with pytest.raises(ValueError, match="for another environment"):
        make_learner(masks, setup, going_on, 5)


def same(net: nn.Module, other_net: nn.Module) -> None:
    weights, other_weights = net.state_dict(), other_net.state_dict()
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(v, other_weights[k]) for k, v in weights.items())


def test_a_policy_of_a_script_is_built_again_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "policy.pt"
    options = {"share_params": False, "num_cells": (6,), "activation_class": nn.ReLU}
    policy = make_policy(CountingEnv, **options)
    save_policy(path, policy, CountingEnv, **options)
    same(load_policy(path, CountingEnv), policy)
    same(PolicyRequest(str(path), False, True, 0).build(describe(CountingEnv)), policy)
    with pytest.raises(ValueError, match="builds another policy"):
        save_policy(path, policy, CountingEnv)
    with pytest.raises(ValueError, match="builds another policy"):  # Another network.
        save_policy(path, policy, CountingEnv, share_params=False, num_cells=(6,))
    double = make_policy(CountingEnv, **options).double()
    with pytest.raises(ValueError, match="float64, which load_policy would not"):
        save_policy(path, double, CountingEnv, **options)
    with pytest.raises(ValueError, match="Discrete.4., but has .* with action masks"):
        load_policy(path, partial(CountingEnv, action_mask=True))
    with pytest.raises(ValueError, match="'hunter' had 2 agents, .* has 4 agents"):
        load_policy(path, partial(CountingEnv, n_hunters=4))


def test_a_shared_network_acts_for_other_numbers_of_agents(tmp_path: Path) -> None:
    four = partial(CountingEnv, n_hunters=4)
    path = tmp_path / "policy.pt"
    policy = make_policy(CountingEnv)
    save_policy(path, policy, CountingEnv)
    hunters, prey = torch.rand(6, 4, 5), torch.rand(6, 3, 3)
    outputs = load_policy(path, four)(seen(hunters, prey))
    halves = [policy(seen(half, prey)) for half in hunters.split(2, dim=1)]
    for key in ("action", "action_log_prob"):
        expected = torch.cat([half["hunter", key] for half in halves], 1)
        torch.testing.assert_close(outputs["hunter", key], expected)
    options: dict[str, object] = {"recurrent": "gru"}
    save_policy(path, make_policy(CountingEnv, **options), CountingEnv, **options)
    assert evaluate(load_policy(path, four), four, episodes=2, num_workers=1).lengths
    for option in ("centralised", "agent_ids"):
        options = {option: True}
        save_policy(path, make_policy(CountingEnv, **options), CountingEnv, **options)
        with pytest.raises(ValueError, match="'hunter' had 2 agents, .* has 4 agents"):
            load_policy(path, four)


def seen(hunters: torch.Tensor, prey: torch.Tensor) -> TensorDict:
    groups = {"hunter": hunters, "prey": prey}
    return TensorDict({g: {"observation": o} for g, o in groups.items()}, [6])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b""), "is damaged, or holds no tensors"),
        (lambda p: torch.save({"a": 1}, p), "only the entries a. Write it with"),
        (lambda p: torch.save(torch.ones(1), p), "only an object of type Tensor"),
        (lambda p: torch.save({"environment": {}}, p), "is damaged, or of another ver"),
    ],
)
def test_other_files_are_named(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    write(path)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        load_policy(path)


def test_a_folder_without_a_single_policy_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="file of a policy or the folder"):
        load_policy(tmp_path)
    for seed in ("seed_0", "seed_1"):
        (tmp_path / seed).mkdir()
        (tmp_path / seed / CONFIG).write_text("{}")
    with pytest.raises(FileNotFoundError, match="choose one of seed_0, seed_1"):
        load_policy(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"best.pt is missing"):
        load_policy(tmp_path / "seed_0")
