"""Learners: what the references of ``reference/`` do not compute.

Their arguments, files of their state, and their batches: padding has no influence, and
other forms of batches are errors.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv
from workloads.pair import PairEnv

from marl_collect import Collector
from marl_collect.core.signature import MEMBER
from marl_collect.envs import PettingZooWrapper
from marl_collect.models import make_policy, save_policy
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
MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")
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
    first, second = batches(learner, 2, environments=2)
    joined = fresh.prepare(torch.cat([first, second], 1))

    def values(data: Any) -> Any:
        return data["hunter", "state_value"].reshape(2, -1, 2)

    learner.update(first, progress=0.0)
    other = values(learner.prepare(moved(second, 2)))
    torch.testing.assert_close(other, values(fresh.prepare(second)))
    learner.update(moved(second, 2), progress=0.0)
    restored = make("mappo-local-shared", **settings)
    restored.load_state_dict(learner.state_dict())
    # Environments are told apart by their index, not by the order of the rows.
    later = values(restored.prepare(second.flip(0))).flip(0)
    torch.testing.assert_close(later, values(joined)[:, 40:])
    for row in range(2):
        assert not torch.allclose(later[row], other[row])


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


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("name", ["iddpg-local-shared", "vdn-local-shared"])
def test_a_learner_explores_by_its_own_options(
    name: str, initial: bool, tmp_path: Path
) -> None:
    """Also before its first batch, whatever weights it was given."""
    is_vdn = name.startswith("vdn")
    factory, path = HUNTERS if is_vdn else pair, tmp_path / "learner.pt"
    saved = make(name, factory, **{"value.noise": 2.0, "value.epsilon_start": 0.5})
    saved.save(path)
    settings = {"value.noise": 0.3, "value.epsilon_start": 0.7}
    more = {"initial": str(path)} if initial else {}
    learner = make(name, factory, **settings, **more)
    if not initial:
        learner.load(path)
    if is_vdn:
        (epsilon,) = learner.policy.buffers()
        assert epsilon.item() == pytest.approx(0.7)
    else:
        scale = batch_of(factory, learner)["agent", "scale"]
        torch.testing.assert_close(scale, torch.full_like(scale, 0.3))


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


@pytest.mark.parametrize("name", ["ippo", "iql", "vdn", "qmix"])
def test_one_hot_actions_are_learnt_like_their_numbers(name: str) -> None:
    learned = []
    for categorical in (True, False):
        factory = partial(PettingZooWrapper, PairEnv(), categorical_actions=categorical)
        learner = make(f"{name}-local-shared", factory)
        learner.update(batch_of(factory, learner), progress=0.5)
        assert learner.updates
        learned.append(torch.cat([p.flatten() for p in learner.parameters()]))
    assert torch.equal(*learned)


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


def test_metrics_are_means_over_the_steps_of_an_update() -> None:
    """Passes over a batch measure the same if the weights hardly move."""
    settings = {"ppo.lr": 1e-12, "ppo.minibatch_frames": 1000}
    once, often = (
        make("ippo-local-shared", **settings | {"ppo.epochs": count})
        for count in (1, 3)
    )
    (batch,) = batches(once)
    expected = pytest.approx(once.update(batch, 0.5), rel=1e-4, abs=1e-6)
    assert often.update(batch, 0.5) == expected
    assert often.updates == 3 * once.updates


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


# Batches that cannot be learnt from


def changed(batch: Any, key: Any, value: Any, at: Any = (0, 3, 1)) -> Any:
    """Return a copy of a batch with another value at some places of an entry."""
    batch = batch.clone()
    batch[key][at] = value
    return batch


def nobody_acts_next(batch: Any) -> Any:
    batch = batch[:, :1].clone()
    for key in ("mask", "done", "terminated", "truncated"):
        batch["next", "hunter", key][:] = False
    return batch


def with_mask(batch: Any, first: bool) -> Any:
    """Return a batch whose first frames are padding, or its last ones."""
    valid = torch.ones(batch.shape, dtype=torch.bool)
    valid[:, 0 if first else -1] = False
    batch = batch.clone()
    batch[MASK] = valid
    return batch


def random_actions(batch: Any) -> Any:
    """Return what collectors write in random frames, with garbage as padding."""
    learner = make("mappo-local-shared")
    (batch,) = batches(learner, environments=len(batch), init_random_frames=1)
    batch = with_mask(batch, first=False)
    for key in ("logits", "action_log_prob"):
        batch["hunter", key][:, -1] = float("nan")
    return batch


def begun_at_random(batch: Any) -> Any:
    """Return whole trajectories, some of which began in random frames."""
    settings = {"init_random_frames": 1, "trajs_per_batch": 12}
    return batches(make("ippo-local-shared"), environments=len(batch), **settings)[0]


NAN = float("nan")
FORMS: list[tuple[Any, str]] = [
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
    (lambda batch: with_mask(batch, first=True), "valid frames after padding"),
]
REWARD, OBSERVATION = ("next", "hunter", "reward"), ("hunter", "observation")
UNUSABLE = [
    *(
        (name, change, f"Learner learns from batches .*{cure}")
        for name in ("ippo", "vdn")
        for change, cure in FORMS
    ),
    *(
        (name, lambda batch: changed(batch, REWARD, NAN), "A reward of group 'hunter'")
        for name in ("ippo", "iql", "vdn")
    ),
    *(
        (
            *(name, lambda batch: changed(batch, OBSERVATION, NAN, ())),
            "gradient of .* is NaN",
        )
        for name in ("ippo", "iql")
    ),
    ("mappo", random_actions, "batch are random.*Omit init_random_frames"),
    ("ippo", begun_at_random, "batch are random.*Omit init_random_frames"),
    ("ippo", nobody_acts_next, "with 1 frames per environment, no agent"),
    (
        *("iql", lambda batch: changed(batch, ("hunter", "mask"), False)),
        "agents wait for their turn here. Use vdn",
    ),
    (
        *("vdn", lambda batch: torch.cat([batch, batch])),
        "from 2 environments, but this one comes from 4",
    ),
    (
        *("vdn gru", lambda batch: changed(batch, IDS, 9 << 32, ())),
        r"after \[0, 1\] this one is of \[9, 9\]: use a C",
    ),
    (
        *("vdn gru", lambda batch: with_mask(batch, first=False)),
        "of the batch ends within one: pass tra",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), UNUSABLE)
def test_what_cannot_be_learnt_from_changes_no_weight(
    name: str, change: Any, words: str
) -> None:
    algorithm, *memory = name.split()
    learner = make(f"{algorithm}-local-shared", recurrent=memory[0] if memory else None)
    first, second = batches(learner, 2, environments=2)
    learner.update(first, progress=0.0)
    before = [weight.clone() for weight in learner.parameters()]
    with pytest.raises(ValueError, match=words):
        learner.update(change(second), progress=0.0)
    assert all(map(torch.equal, learner.parameters(), before))
    if "gradient" not in words:  # After NaN, which may be in a buffer, no run goes on.
        updates = learner.updates
        learner.update(second, progress=0.0)
        assert learner.updates > updates


# Files and states of other learners

FOUR: Any = partial(CountingEnv, n_prey=0, n_hunters=4)


def one_that_does_not_fit(path: Path) -> None:
    """Change the last weight of the last network in a file."""
    state = torch.load(path, weights_only=True)
    weights = state["networks"][list(state["networks"])[-1]]
    weights[list(weights)[-1]] = torch.zeros(99)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("saved", "other", "words"),
    [
        ("mappo-local-shared", {"ppo.target_tau": 0.1}, ".* fit.*target_critic"),
        ("mappo-local-own", {"name": "mappo-local-shared"}, " does not fit"),
        (
            *("ippo-local-shared", {"name": "mappo-local-shared"}),
            ".*the setup ippo-local-share",
        ),
        ("ippo-local-shared", {"factory": FOUR}, ".*2 agents, .* has .*4 agen"),
        ("vdn-local-shared", {"factory": FOUR}, ".*2 agents, .* has .*4 agen"),
        ("qmix-local-shared", {"value.buffer_frames": 200}, " .*=100000 .*=200 "),
        (
            *("qmix-local-shared", {"value.replay": "episodes"}),
            " .*plays frames.*plays episodes",
        ),
        ("mappo-local-shared", one_that_does_not_fit, " does not fit"),
        ("qmix-local-shared", one_that_does_not_fit, " does not fit"),
    ],
)
def test_a_state_of_another_learner_is_refused_before_anything_changes(
    saved: str, other: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "learner.pt"
    first = make(saved, seed=3)
    first.update(batches(first)[0], 0.5)
    first.save(path)
    if callable(other):
        other(path)
        other = {}
    second = make(**{"name": saved} | other)
    before = repr(second.state_dict())
    with pytest.raises(ValueError, match=rf"learner\.pt{words}"):
        second.load(path)
    assert repr(second.state_dict()) == before
    if "setup" not in words:
        state = torch.load(path, weights_only=True)
        with pytest.raises((KeyError, RuntimeError, ValueError)):
            second.load_state_dict(state)
        assert repr(second.state_dict()) == before


def test_moments_of_returns_count_where_values_are_normalised_only() -> None:
    first = make("mappo-local-shared")
    (batch,) = batches(first)
    first.update(batch, 0.0)
    losses, none = [], dict[str, Any]()
    for moments in (first.state_dict()["moments"], none):
        other = make(
            "mappo-local-shared", **UNSCALED, **{"ppo.normalise_values": False}
        )
        other.load_state_dict(first.state_dict() | {"moments": moments})
        losses.append(other.update(batch, 0.0)["loss_critic"])
    assert losses[0] == losses[1]


def test_a_file_without_a_learner_is_named(tmp_path: Path) -> None:
    path, learner = tmp_path / "learner.pt", make("mappo-local-shared")
    policy = make_policy(DESCRIPTION, num_cells=(8,))
    save_policy(path, policy, DESCRIPTION, num_cells=(8,))
    with pytest.raises(ValueError, match=r"learner\.pt has a policy only"):
        learner.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        learner.load(tmp_path / "none.pt")


@pytest.mark.accelerator
@pytest.mark.parametrize("recurrent", [None, "gru"])
@pytest.mark.parametrize(
    "name",
    ["mappo-local-shared", "ippo-local-own", "vdn-local-shared", "qmix-local-shared"],
)
def test_a_gpu_learns_what_the_cpu_does(name: str, recurrent: str | None) -> None:
    """Value learners draw the same frames from a buffer there."""
    options = UNSCALED | {"recurrent": recurrent}
    on_gpu, on_cpu = make(name, device="cuda", **options), make(name, **options)
    batch = batch_of(HUNTERS, on_cpu)
    before = [parameter.clone() for parameter in on_gpu.parameters()]
    assert all(parameter.is_cuda for parameter in before)
    for _ in range(2):
        expected = on_cpu.update(batch, progress=0.5)
        metrics = on_gpu.update(batch, progress=0.5)
        assert metrics == pytest.approx(expected, rel=1e-2, abs=1e-3, nan_ok=True)
    assert not any(map(torch.equal, on_gpu.parameters(), before))
    on_cpu.load_state_dict(on_gpu.state_dict())
    for ours, theirs in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())
