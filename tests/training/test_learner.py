"""What all learners share: their arguments, files of their state, and their batches.

Padding has no influence, and other forms of batches are errors.
"""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import Collector, evaluate
from marl_collect.models import load_policy, make_policy, save_policy
from marl_collect.training.learner import Learner, learner_of
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import make_learner

SETTINGS = {
    "num_cells": (8,),
    "hidden_size": 8,
    "standardise_rewards": True,
    "reward": "team",
    "ppo.minibatch_frames": 16,
    "ppo.epochs": 2,
    "ppo.sequence_frames": 4,
    "ppo.normalise_values": True,
    "value.minibatch_frames": 8,
    "value.minibatch_episodes": 3,
    "value.warm_up_frames": 0,
    "value.epsilon_frames": 100,
}
HUNTERS: Any = partial(CountingEnv, n_prey=0)
DESCRIPTION = HUNTERS().description
MASK = ("collector", "mask")


def make(name: str, *, seed: int = 0, **settings: Any) -> Any:
    setup = Setup.parse(name)
    options = TrainingOptions().with_settings(SETTINGS | settings)
    return learner_of(setup.algorithm)(DESCRIPTION, setup, options, seed)


def batches(
    learner: Learner, count: int = 1, environments: int = 1, **options: Any
) -> list[Any]:
    frames = 40 * environments
    with Collector(
        HUNTERS,
        learner.policy,
        frames_per_batch=frames,
        envs_per_worker=environments,
        seed=1,
        **options,
    ) as collector:
        return [collector.next().clone() for _ in range(count)]


def padded(batch: Any, frames: int, row: bool = False) -> Any:
    """Return a batch with frames of garbage, also in a row of its own."""
    garbage: Any = torch.cat([batch] * 9, 1)[:, : batch.shape[1] + frames].clone()
    if row:
        garbage = torch.cat([garbage, garbage[:1]])
    valid = torch.zeros(garbage.shape, dtype=torch.bool)
    valid[: len(batch), : batch.shape[1]] = True
    for leaf in garbage.values(include_nested=True, leaves_only=True):
        invalid = leaf[~valid]
        leaf[~valid] = torch.full_like(
            invalid, float("nan") if invalid.is_floating_point() else 1
        )
    garbage[MASK] = valid
    return garbage


def in_rows(batch: Any) -> Any:
    """Return the episodes of one row as rows with garbage behind them."""
    ids = batch["collector", "traj_ids"][0]
    episodes = [batch[:, ids == k] for k in ids.unique()]
    longest = max(episode.shape[1] for episode in episodes)
    return torch.cat([padded(e, longest + 2 - e.shape[1]) for e in episodes])


def weights_after(learner: Any, *learnt: Any) -> list[Any]:
    for batch in learnt:
        learner.update(batch, progress=0.5)
    return [
        *learner.parameters(),
        *[weight for net in learner.untrained.values() for weight in net.parameters()],
    ]


@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("algorithm", ["mappo", "ia2c"])
def test_ppo_ignores_padding(algorithm: str, row: bool, recurrent: str | None) -> None:
    name = f"{algorithm}-local-shared"
    learner, other = (make(name, recurrent=recurrent) for _ in range(2))
    learnt = batches(learner, 2, environments=3)
    expected = weights_after(learner, *learnt)
    actual = weights_after(other, *(padded(b, k, row) for k, b in enumerate(learnt, 4)))
    for one, two in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)
    # With which the critic reads the next batch, and which weights hardly show.
    torch.testing.assert_close(other._states, learner._states, rtol=1e-4, atol=1e-4)
    assert len(other._states) == (3 if recurrent else 0)
    assert other.frames == learner.frames == 240


@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("algorithm", ["iql", "vdn", "qmix"])
def test_value_learners_ignore_padding(algorithm: str, recurrent: str | None) -> None:
    name = f"{algorithm}-local-shared"
    learner, other = (make(name, recurrent=recurrent) for _ in range(2))
    learnt = []
    for batch in batches(learner, 2):  # Whole episodes, in one row.
        last = int(batch["next", "done"].flatten().nonzero()[-1])
        learnt.append(batch[:, : last + 1])
    ids = learnt[1]["collector", "traj_ids"][0]
    learnt[1] = learnt[1][:, ids != ids[0]]
    expected = weights_after(learner, *learnt)
    actual = weights_after(other, *map(in_rows, learnt))
    assert learner.updates == other.updates > 0
    assert learner.frames == other.frames == len(other.replay)
    for one, two in zip(expected, actual, strict=True):
        assert torch.equal(one, two)


def moved(batch: Any, environment: int) -> Any:
    """Return a batch as if it were of another environment."""
    batch = batch.clone()
    batch["collector", "traj_ids"] += environment << 32
    return batch


def test_environments_have_critic_states_of_their_own() -> None:
    """As in batches of different workers of a ``MultiAsyncCollector``."""
    settings: dict[str, Any] = {"recurrent": "gru", "ppo.lr": 1e-12}
    settings["ppo.normalise_values"] = False  # Their unit moves with each batch.
    learner, fresh = (make("mappo-local-shared", **settings) for _ in range(2))
    first, second = batches(learner, 2)
    joined = fresh.prepare(torch.cat([first, second], 1))
    state_value = ("hunter", "state_value")
    learner.update(first, progress=0.0)
    other = learner.prepare(moved(second, 1))
    torch.testing.assert_close(other[state_value], fresh.prepare(second)[state_value])
    learner.update(moved(second, 1), progress=0.0)
    restored = make("mappo-local-shared", **settings)
    restored.load_state_dict(learner.state_dict())
    later = restored.prepare(second)[state_value].flatten(0, 1)
    expected = joined[state_value].flatten(0, 1)[40:]
    torch.testing.assert_close(later, expected)
    assert not torch.allclose(later, other[state_value].flatten(0, 1))


def test_whole_episodes_of_other_environments_are_refused() -> None:
    """A later part of their episodes would be taken for a whole one."""
    learner = make("vdn-local-shared", recurrent="gru")
    first, second = batches(learner, 2)
    learner.update(first, progress=0.0)
    with pytest.raises(ValueError, match=r"after \[0\] this one is of \[1\]: use a C"):
        learner.update(moved(second, 1), progress=0.0)
    of_frames = make("vdn-local-shared")
    for batch in (first, moved(second, 1)):
        of_frames.update(batch, progress=0.0)
    assert len(of_frames.replay) == 80


def test_whole_episodes_are_not_learnt_from_pieces() -> None:
    learner = make("vdn-local-shared", recurrent="gru")
    (batch,) = batches(learner, split_trajs=True)
    with pytest.raises(ValueError, match="of the batch ends within one: pass tra"):
        learner.update(batch, progress=0.0)
    learner = make("vdn-local-shared")
    learner.update(batch, progress=0.0)
    assert len(learner.replay) == 40


@pytest.mark.parametrize("algorithm", ["ippo", "vdn"])
@pytest.mark.parametrize(
    ("form", "cure"),
    [
        (lambda batch: batch.reshape(-1), r"batch size \[80\]: omit cat_results"),
        (lambda batch: batch.unsqueeze(0), r"\[1, 2, 40\]: omit cat_results"),
        (lambda batch: batch.transpose(0, 1), r"\[T, B\] = \[40, 2\]: pass batch.tra"),
        (
            lambda batch: torch.cat(list(batch.split(1)), 1),
            "several environments in a row: omit cat_results",
        ),
        (
            lambda batch: batch.exclude(("next", "hunter", "observation")),
            r"no next observations: pass restore_next\(batch\)",
        ),
        (
            lambda batch: padded(batch, 2)[:, torch.arange(41, -1, -1)],
            "valid frames after padding",
        ),
    ],
)
def test_other_forms_of_batches_fail(algorithm: str, form: Any, cure: str) -> None:
    learner = make(f"{algorithm}-local-shared")
    (batch,) = batches(learner, environments=2)
    before = [weight.clone() for weight in learner.parameters()]
    with pytest.raises(ValueError, match=f"Learner learns from batches .*{cure}"):
        learner.update(form(batch), progress=0.5)
    assert all(map(torch.equal, learner.parameters(), before))
    assert learner.frames == 0
    learner.update(batch, progress=0.5)


@pytest.mark.parametrize("name", ["ippo-local-shared", "vdn-local-shared"])
def test_a_state_of_another_environment_is_refused(name: str) -> None:
    """Networks that agents share fit any number of agents; buffers do not."""
    learner, setup = make(name), Setup.parse(name)
    four = partial(CountingEnv, n_prey=0, n_hunters=4)
    options = learner.options
    other = learner_of(setup.algorithm)(four().description, setup, options, seed=3)
    before = [weight.clone() for weight in other.parameters()]
    with pytest.raises(ValueError, match="2 agents, .* this environment has .*4 agen"):
        other.load_state_dict(learner.state_dict())
    assert all(map(torch.equal, other.parameters(), before))


def test_value_learners_count_the_frames_that_they_have_seen() -> None:
    """Not ``progress`` of the frames in the options, which a loop need not set."""
    settings = {"value.warm_up_frames": 60, "value.epsilon_frames": 160}
    learner = make("vdn-local-shared", **settings)
    learnt = batches(learner, 4)
    epsilons = []
    for number, batch in enumerate(learnt):
        if number == 2:  # A restart.
            state = learner.state_dict()
            learner = make("vdn-local-shared", **settings)
            learner.load_state_dict(state)
        epsilons.append(learner.update(batch, progress=1.0)["epsilon"])
        (acting,) = [b for n, b in learner.policy.named_buffers() if "epsilon" in n]
        assert float(acting) == pytest.approx(epsilons[-1])
        assert (learner.updates > 0) == (number > 0)
    expected = [1 - share * 0.95 for share in (0.25, 0.5, 0.75, 1)]
    assert epsilons == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ippo-local-own", "iql-local-own", "vdn-local-own"])
def test_a_reward_that_is_not_finite_is_named(name: str) -> None:
    learner = make(name)
    (batch,) = batches(learner)
    batch["next", "hunter", "reward"][0, 3, 1] = float("nan")
    with pytest.raises(ValueError, match="A reward of group 'hunter' is NaN"):
        learner.update(batch, progress=0.0)


def test_a_batch_without_a_known_outcome_says_what_to_change() -> None:
    learner = make("ippo-local-shared")
    batch = batches(learner)[0][:, :1]
    for key in ("mask", "done", "terminated", "truncated"):  # Everybody waits next.
        batch["next", "hunter", key][:] = False
    with pytest.raises(ValueError, match="with 1 frames per environment, no agent"):
        learner.update(batch, progress=0.0)


# Arguments, and files of a learner's state


@pytest.mark.parametrize(
    ("position", "wrong", "cure"),
    [
        (0, HUNTERS, r"describe\(make_env\)"),
        (0, HUNTERS(), r"describe\(make_env\)"),
        (1, "mappo", r"Setup\('mappo'\)"),
        (1, "mapo", r"Setup\('mappo'\)"),
        (2, {"gamma": 0.9}, r"TrainingOptions\(\)\.with_settings"),
        (2, None, r"TrainingOptions\(\)"),
    ],
)
@pytest.mark.parametrize("algorithm", ["mappo", "vdn"])
def test_an_argument_of_another_kind_is_an_error_that_says_what_to_pass(
    position: int, wrong: Any, cure: str, algorithm: str
) -> None:
    arguments: list[Any] = [DESCRIPTION, Setup(algorithm), TrainingOptions()]
    arguments[position] = wrong
    kind: Any = learner_of(algorithm)
    with pytest.raises(TypeError, match=cure) as excinfo:
        kind(*arguments, seed=0)
    assert kind.__name__ in str(excinfo.value)
    assert type(wrong).__name__ in str(excinfo.value)


@pytest.mark.parametrize("setup", ["mappo-local-shared", "vdn-local-shared"])
def test_targets_begin_with_the_initial_weights(setup: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ppo.target_tau": 0.1}
    saved = make(setup, **settings)
    saved.save(tmp_path / "learner.pt")
    options = saved.options.with_settings({"initial": str(tmp_path / "learner.pt")})
    learner: Any = make_learner(DESCRIPTION, saved.setup, options, 3)
    (target,) = learner.untrained.values()
    followed = learner.critic if setup.startswith("mappo") else learner.online
    for one, other in zip(target.parameters(), followed.parameters(), strict=True):
        assert (one == other).all()


@pytest.mark.processes
def test_the_policy_of_a_saved_learner_needs_no_options(tmp_path: Path) -> None:
    learner = make("mappo-centralised-own", recurrent="gru", activation="relu")
    learner.save(tmp_path / "learner.pt")
    policy = load_policy(tmp_path / "learner.pt", HUNTERS)
    played = [
        evaluate(p, HUNTERS, episodes=3, seeds=0).team_returns
        for p in (learner.policy, policy)
    ]
    assert played[0] == played[1]


@pytest.mark.parametrize(
    ("saved", "setup", "settings", "message"),
    [
        ("mappo-local-shared", None, {"ppo.target_tau": 0.1}, ".* fit.*target_critic"),
        ("mappo-local-own", "mappo-local-shared", {}, " does not fit"),
        ("ippo-local-shared", "mappo-local-shared", {}, ".*the setup ippo-local-share"),
        ("qmix-local-shared", None, {"value.buffer_frames": 200}, " .*=100000 .*=200 "),
        (
            "qmix-local-shared",
            None,
            {"value.replay": "episodes"},
            " .*plays frames.*plays episodes",
        ),
    ],
)
def test_a_file_of_another_learner_is_refused_before_anything_changes(
    saved: str, setup: Any, settings: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "learner.pt"
    first = make(saved, seed=3)
    first.update(batches(first)[0], 0.5)
    first.save(path)
    second = make(setup or saved, **settings)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match=rf"learner\.pt{message}"):
        second.load(path)
    assert repr(second.state_dict()) == repr(before)


def test_a_file_without_a_learner_is_named(tmp_path: Path) -> None:
    path, learner = tmp_path / "learner.pt", make("mappo-local-shared")
    policy = make_policy(DESCRIPTION, num_cells=(8,))
    save_policy(path, policy, DESCRIPTION, num_cells=(8,))
    with pytest.raises(ValueError, match=r"learner\.pt has a policy only"):
        learner.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        learner.load(tmp_path / "none.pt")


@pytest.mark.parametrize("setup", ["mappo-local-shared", "qmix-local-shared"])
def test_all_networks_stay_if_one_does_not_fit(setup: str, tmp_path: Path) -> None:
    path = tmp_path / "learner.pt"
    first = make(setup, seed=3)
    first.save(path)
    state = torch.load(path, weights_only=True)
    last = list(first.networks)[-1]
    weights = state["networks"][last]
    weights[list(weights)[-1]] = torch.zeros(99)
    torch.save(state, path)
    second = make(setup)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match=rf"The {last} in .*learner\.pt does not fit"):
        second.load(path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        second.load_state_dict(state)
    assert repr(second.state_dict()) == repr(before)


@pytest.mark.parametrize("name", ["ippo-local-shared", "iql-local-shared"])
def test_an_update_has_the_threads_of_its_options(name: str) -> None:
    learner = make(name)
    [batch] = batches(learner, environments=3)
    seen: list[int] = []
    learner.optimizer.register_step_post_hook(
        lambda *_: seen.append(torch.get_num_threads())
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for count, expected in ((1, 1), (2, 2), (None, 3)):
            learner.options = replace(learner.options, threads=count)
            seen.clear()
            learner.update(batch, progress=0.5)
            assert set(seen) == {expected}
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
