"""Learners: what the references of ``reference/`` do not compute.

Their arguments, files of their state, and their batches: padding has no influence, and
other forms of batches are errors.
"""

import copy
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv
from workloads.pair import PairEnv

from marl_collect import Collector, evaluate
from marl_collect.core.signature import MEMBER
from marl_collect.envs import PettingZooWrapper
from marl_collect.models import load_policy, make_critic, make_policy, save_policy
from marl_collect.training import ppo
from marl_collect.training.advantages import TRAINED
from marl_collect.training.learner import Learner, RunningMoments, learner_of
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
IMAGES = partial(CountingEnv, image=(32, 32, 3))
DESCRIPTION = HUNTERS().description
MASK = ("collector", "mask")
UNSCALED: dict[str, Any] = {"standardise_rewards": False, "reward": "agent"}


def pair() -> PettingZooWrapper:
    return PettingZooWrapper(PairEnv(continuous=True))


def make(name: str, factory: Any = HUNTERS, **settings: Any) -> Any:
    """Return a learner with these settings, and with a seed that is among them."""
    setup, seed = Setup.parse(name), settings.pop("seed", 0)
    options = TrainingOptions().with_settings(SETTINGS | settings)
    return make_learner(factory().description, setup, options, seed)


def batch_of(factory: Any, learner: Any) -> Any:
    with Collector(factory, learner.policy, frames_per_batch=60, seed=1) as collector:
        return collector.next().clone()


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
    learner = make(setup, seed=3, initial=str(tmp_path / "learner.pt"), **settings)
    for one, other in zip(
        learner.policy.parameters(), saved.policy.parameters(), strict=True
    ):
        assert (one == other).all()
    (target,) = learner.untrained.values()
    followed = learner.critic if setup.startswith("mappo") else learner.online
    for one, other in zip(target.parameters(), followed.parameters(), strict=True):
        assert (one == other).all()


def test_frames_beyond_those_of_a_run_have_no_negative_learning_rate() -> None:
    learner = make("ippo-local-shared", **{"ppo.anneal": True})
    before = copy.deepcopy(learner.policy.state_dict())
    for progress in (1.0, 1.25):
        assert learner.update(batches(learner)[0], progress)["lr"] == 0.0
    for name, weight in learner.policy.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.processes
def test_the_policy_of_a_saved_learner_needs_no_options(tmp_path: Path) -> None:
    learner = make("mappo-centralised-own", recurrent="gru", activation="relu")
    learner.save(tmp_path / "learner.pt")
    policy = load_policy(tmp_path / "learner.pt")
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


@pytest.mark.parametrize("name", ["ippo-local-shared", "iql-local-shared"])
def test_a_loaded_learner_keeps_its_own_options(name: str) -> None:
    settings: dict[str, Any] = {"value.lr": 0.5}
    first = make(name, **settings)
    first.update(*batches(first), 0.5)
    second = make(name, standardise_rewards=False)
    second.load_state_dict(first.state_dict())
    rewards = torch.arange(4.0)
    assert torch.equal(second._scaled("hunter", rewards), rewards)
    assert not torch.equal(first._scaled("hunter", rewards), rewards)
    first.load_state_dict(make(name).state_dict())  # It has seen no rewards.
    assert torch.equal(first._scaled("hunter", rewards), rewards)
    if name.startswith("iql"):
        assert second.optimizer.param_groups[0]["lr"] == TrainingOptions().value.lr


WITH_TARGETS: dict[str, Any] = {"ppo.target_tau": 0.1}


def loaded(learner: Any, name: str) -> Any:
    other = make(name, seed=1, **WITH_TARGETS)
    other.load_state_dict(learner.state_dict())
    return other


@pytest.mark.parametrize("name", ["mappo-local-shared", "qmix-local-shared"])
@pytest.mark.parametrize(
    "copied",
    [
        loaded,
        lambda learner, _: copy.deepcopy(learner),
        lambda learner, _: pickle.loads(pickle.dumps(learner)),
    ],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_a_copy_of_a_learner_learns_what_it_does_and_does_not_disturb_it(
    copied: Any, name: str
) -> None:
    learner, undisturbed = (make(name, **WITH_TARGETS) for _ in range(2))
    learnt = batches(learner, 3)
    weights_after(learner, learnt[0])
    weights_after(undisturbed, learnt[0])
    other = copied(learner, name)
    from_copy = weights_after(other, *learnt[1:])
    expected = weights_after(undisturbed, *learnt[1:])
    actual = weights_after(learner, *learnt[1:])
    for one, two, three in zip(expected, actual, from_copy, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("padding", [False, True])
def test_ppo_does_not_learn_from_random_actions(padding: bool) -> None:
    learner = make("mappo-local-shared")
    random, chosen = batches(learner, 2, init_random_frames=1)
    random = padded(random, 4) if padding else random
    with pytest.raises(ValueError, match="batch are random.*Omit init_random_frames"):
        learner.update(random, 0.5)
    assert learner.updates == 0
    learner.update(chosen, 0.5)
    assert learner.updates > 0


def test_equal_rewards_become_zeros() -> None:
    moments = RunningMoments()
    assert moments.standardise(torch.ones(2)).tolist() == [1.0, 1.0]
    moments.add(torch.full((3,), 7.0))
    moments.add(torch.zeros(0))
    assert moments.standardise(torch.full((2,), 7.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", ["ippo", "mappo", "iql", "vdn", "qmix"])
def test_the_rewards_of_rivals_are_not_the_team_s(name: str, mask: bool) -> None:
    settings = {"gamma": 0.0, "ppo.normalise_advantages": False}
    settings |= dict.fromkeys(("standardise_rewards", "ppo.normalise_values"), False)
    factory: Any = partial(CountingEnv, n_hunters=4, n_prey=0, mask=mask)
    options = TrainingOptions().with_settings(SETTINGS | settings)
    learner: Any = learner_of(name)(factory().description, Setup(name), options, 0)
    with Collector(
        factory,
        policies={"main": learner.policy, "rival": None},
        assign=lambda seed, agents: {
            agent: "main" if (seed + k) % 4 < 1 + seed % 3 else "rival"
            for k, agent in enumerate(agents)
        },
        frames_per_batch=60,
        seed=0,
    ) as collector:
        batch = collector.next().clone()
        of_main = collector.policy.batch_of(batch, "main")
    rewards = batch["next", "hunter", "reward"][0, :, :, 0].tolist()
    ids = batch["hunter", "policy_id"][0].tolist()
    expected = []
    for row, policies in zip(rewards, ids, strict=True):
        team = [r for r, policy in zip(row, policies, strict=True) if policy == 0]
        expected.append(sum(team) / (1 if name in ("vdn", "qmix") else len(team)))
    if "ppo" in name:
        data = learner.prepare(of_main)["hunter"]
        for t, reward in enumerate(expected):
            for target in data["value_target"][t][data["trained"][t]]:
                assert target.item() == pytest.approx(reward, abs=1e-5)
        assert data["trained"].sum() > 60
    if name == "ippo":  # Nor are the values of what they observe after the batch.
        options = options.with_settings({"gamma": 0.9})
        learner = learner_of(name)(factory().description, Setup(name), options, 0)
        for end in range(1, 60):
            data = of_main[:, :end].clone()
            moved = data.clone()
            moved["next", "hunter", "observation"][~data["hunter", MEMBER]] += 1
            data, moved = (learner.prepare(b)["hunter"] for b in (data, moved))
            used = data["trained"]
            assert torch.equal(data["value_target"][used], moved["value_target"][used])
    if "ppo" not in name:
        learner.remember(of_main)
        (stored,) = learner.replay._columns["reward"]
        stored = stored[:60].reshape(60, -1)
        for row, reward in zip(stored.tolist(), expected, strict=True):
            assert row == pytest.approx([reward] * len(row), abs=1e-5)


def test_minibatches_have_a_seed_of_their_own() -> None:
    """The number is that of docs/architecture.md ("Seeds")."""
    assert (
        make("ippo-local-shared", CountingEnv).generator.initial_seed()
        == 4890566965504419038
    )


def test_metrics_are_means_over_groups_and_losses_are_sums() -> None:
    """Each group is seen alone if no row of the other is trained."""
    learner = make("ippo-local-shared", CountingEnv)
    batch = learner.prepare(batch_of(CountingEnv, learner)).reshape(-1)
    for group in ("hunter", "prey"):
        # The policies differ from those that acted, so that no metric is zero.
        batch[group, "action_log_prob"] -= 0.5 if group == "hunter" else 0.1

    def measured(*groups: str) -> tuple[Any, dict[str, Any]]:
        minibatch = batch.clone()
        for group in {"hunter", "prey"}.difference(groups):
            minibatch = minibatch.exclude((group, TRAINED))
        torch.manual_seed(0)
        loss, logged = learner.loss(minibatch)
        return loss.detach(), {name: float(value) for name, value in logged.items()}

    loss, logged = measured("hunter", "prey")
    (hunter_loss, hunter), (prey_loss, prey) = measured("hunter"), measured("prey")
    torch.testing.assert_close(loss, hunter_loss + prey_loss)
    assert {"kl_approx", "clip_fraction", "loss_objective"} <= logged.keys()
    for name in logged:
        if name not in ("entropy", "loss_entropy"):  # Drawn for actions in a Box.
            assert logged[name] == pytest.approx((hunter[name] + prey[name]) / 2), name
    assert hunter["kl_approx"] != pytest.approx(prey["kl_approx"])


@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("name", ["ippo-local-own", "mappo-centralised-shared"])
def test_orthogonal_weights_are_orthogonal(name: str, recurrent: str | None) -> None:
    settings: dict[str, Any] = {"ppo.orthogonal": True, "ppo.policy_gain": 0.05}
    settings |= {"activation": "relu", "recurrent": recurrent}
    learner = make(name, CountingEnv, **settings)
    found = set()
    for network in learner.networks.values():
        for key, parameter in network.named_parameters():
            if key.endswith("bias"):
                assert not parameter.any()
                continue
            values = torch.linalg.svdvals(parameter.detach())
            torch.testing.assert_close(values, values.flatten()[0].expand_as(values))
            found.add(round(float(values.flatten()[0]), 4))
    # Outputs of the policy; of the critic, and within recurrent networks; the others.
    assert found == {0.05, 1.0, 1.4142}
    weights = [w for n, w in learner.policy.named_parameters() if "hunter" in n]
    last = next(w for w in reversed(weights) if w.any())
    assert float(torch.linalg.svdvals(last.detach()).max()) == pytest.approx(0.05)


def test_an_observation_that_is_not_finite_makes_no_weight_nan() -> None:
    learner = make("ippo-local-shared", CountingEnv)
    batch = batch_of(CountingEnv, learner)
    batch["hunter", "observation"][0, 3] = float("nan")
    with pytest.raises(ValueError, match="gradient of ippo-local-shared is NaN"):
        learner.update(batch, progress=0.0)
    assert all(p.isfinite().all() for p in learner.parameters())


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mappo-local-shared", {}),
        ("ippo-local-own", {"recurrent": "gru"}),
        ("mappo-centralised-shared", {}),
    ],
)
def test_a_gpu_learns_what_the_cpu_does(name: str, options: dict[str, Any]) -> None:
    options = options | UNSCALED
    on_gpu = make(name, CountingEnv, device="cuda", **options)
    on_cpu = make(name, CountingEnv, **options)
    batch = batch_of(CountingEnv, on_cpu)
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-3)
    assert all(p.is_cuda for p in on_gpu.parameters())
    prepared, expected = on_gpu.prepare(batch), on_cpu.prepare(batch)
    for group in ("hunter", "prey"):
        close(prepared[group, "advantage"].cpu(), expected[group, "advantage"])
    metrics = on_gpu.update(batch, progress=0.0)
    reference = on_cpu.update(batch, progress=0.0)
    for each in (metrics, reference):
        del each["entropy"]  # Of continuous actions: estimated from a device's draws.
    assert metrics == pytest.approx(reference, rel=1e-2, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_pictures_of_few_frames_are_criticised_at_once(
    recurrent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"recurrent": recurrent, "ppo.sequence_frames": 10}
    learner = make("mappo-local-shared", IMAGES, **settings)
    batch = batch_of(IMAGES, learner)
    groups = learner.description.groups
    observed = sum(batch[:1, :1][g].select("observation").bytes() for g in groups)
    monkeypatch.setattr(ppo, "_OBSERVED_AT_ONCE", 5 * observed + 1)
    sizes: list[int] = []
    hook = lambda _, args: sizes.append(args[0].numel())  # noqa: E731
    learner.critic.register_forward_pre_hook(hook)
    learner.prepare(batch)
    assert max(sizes) == 5
    assert sum(sizes) == 2 * batch.numel()


@pytest.mark.accelerator
@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize("name", ["vdn-local-shared", "qmix-local-shared"])
def test_a_gpu_learns_from_a_buffer_there(name: str, recurrent: str | None) -> None:
    options = UNSCALED | {"recurrent": recurrent}
    on_gpu = make(name, device="cuda", **options)
    on_cpu = make(name, **options)
    batch = batch_of(HUNTERS, on_cpu)
    before = [p.clone() for p in on_gpu.parameters()]
    assert all(p.is_cuda for p in before)
    for _ in range(2):  # The same frames are drawn.
        reference = pytest.approx(on_cpu.update(batch, progress=0.5), rel=1e-2)
        assert on_gpu.update(batch, progress=0.5) == reference
    assert not any(map(torch.equal, on_gpu.parameters(), before))
    on_cpu.load_state_dict(on_gpu.state_dict())
    for ours, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def test_a_batch_of_other_environments_is_an_error() -> None:
    learner = make("vdn-local-shared")
    batch = batch_of(HUNTERS, learner)
    learner.remember(batch)
    with pytest.raises(ValueError, match="from 1 environments, but this one comes fro"):
        learner.remember(torch.cat([batch, batch]))


def test_gradient_steps_count_frames_or_episodes_across_batches() -> None:
    frames = make("vdn-local-shared", **{"value.frames_per_update": 40})
    episodes = {"value.replay": "episodes", "value.episodes_per_update": 7}
    whole = make("vdn-local-shared", **episodes)
    batch = batch_of(HUNTERS, frames)
    ends = int(batch["next", "done"].sum())
    for number in (1, 2, 3):
        frames.update(batch, progress=1.0)
        whole.update(batch, progress=1.0)
        assert frames.updates == number * 60 // 40
        assert whole.updates == number * ends // 7


def test_a_checkpoint_has_the_filled_rows_of_the_buffer(tmp_path: Path) -> None:
    name = "vdn-local-shared"
    learner = make(name, **{"value.buffer_frames": 1_000_000})
    path = tmp_path / "state.pt"
    torch.save(make(name).state_dict(), path)
    empty = path.stat().st_size
    learner.update(batch_of(HUNTERS, learner), progress=0.5)
    torch.save(learner.state_dict(), path)
    assert path.stat().st_size < empty + 1_000_000  # A row has about 200 bytes.


def test_mixing_gain_scales_the_initial_weights_of_mixer_and_target() -> None:
    """Otherwise overestimated targets grow without bound."""
    full, small = (
        make("qmix-local-shared", **{"value.mixing_gain": gain}) for gain in (1.0, 0.25)
    )
    for name, wanted in full.mixer.state_dict().items():
        gain = 0.25 if name.endswith("weight") else 1.0
        torch.testing.assert_close(small.mixer.state_dict()[name], gain * wanted)
    online, target = small.online.parameters(), small.target.parameters()
    for ours, theirs in zip(online, target, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        values = torch.zeros(60, 2, 1)
        observation = batch_of(HUNTERS, small)["hunter", "observation"].reshape(
            60, 2, -1
        )
        one = small.mixer(values, observation)
        assert (small.mixer(values + 1, observation) > one).all()


@pytest.mark.processes
def test_noise_stays_with_the_weights_of_another_learner(tmp_path: Path) -> None:
    name, saved = "maddpg-local-shared", tmp_path / "policy.pt"
    chosen = make(name, pair).policy_options
    save_policy(saved, make_policy(pair, **chosen), pair, **chosen)
    for initial in (None, str(saved)):
        learner = make(name, pair, initial=initial, **{"value.noise": 0.3})
        batch = batch_of(pair, learner)
        for updates in (0, 3):
            assert learner.updates == updates
            scale = learner.policy.get_dist(batch).scale
            assert scale.flatten().tolist() == pytest.approx([0.3] * 120)
            learner.update(batch, 1.0)


@pytest.mark.parametrize(
    ("factory", "name", "settings", "error", "message"),
    [
        (CountingEnv, "ippo", {"device": "meta"}, ValueError, "cannot be used: Tensor"),
        (
            *(HUNTERS, "vdn", {"recurrent": "gru", "value.replay": "frames"}),
            *(ValueError, "needs whole episodes, but value.replay is"),
        ),
        (
            *(HUNTERS, "vdn", {"frames": 60, "value.warm_up_frames": 61}),
            *(ValueError, "frames is 60, but training begins after"),
        ),
        (CountingEnv, "vdn", {}, TypeError, "of one group, but there are hunter, prey"),
        (CountingEnv, "maddpg", {}, TypeError, "maddpg needs continuous actions"),
        *(
            (pair, "maddpg", {name: value}, ValueError, f"{name} is {value!r}, but mad")
            for name, value in (("recurrent", "gru"), ("last_action", True))
        ),
    ],
)
def test_what_a_learner_cannot_use_is_named(
    factory: Any, name: str, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(f"{name}-local-shared", factory, **settings)


@pytest.mark.parametrize(("factory", "name"), [(HUNTERS, "iql"), (pair, "maddpg")])
def test_agents_that_wait_for_their_turn_are_refused(factory: Any, name: str) -> None:
    learner = make(f"{name}-local-shared", factory)
    batch = batch_of(factory, learner)
    (group,) = learner.description.groups
    batch[group, "mask"] = torch.ones(batch[group, "done"].shape[:-1]).bool()
    batch[group, "mask"][0, 5, 1] = batch[group, "done"][0, 5, 1] = False
    with pytest.raises(ValueError, match="agents wait for their turn here. Use vdn"):
        learner.update(batch, 1.0)


@pytest.mark.processes
def test_critics_of_discrete_actions_are_refused() -> None:
    with pytest.raises(TypeError, match="actions=True needs Box actions, but hunter"):
        make_critic(CountingEnv, actions=True)
