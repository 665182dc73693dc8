"""Collectors in one process: batches, trajectories, options, resuming."""

import inspect
from typing import Any

import pytest
import torch
from conformance_tools import (
    ACTION,
    IDS,
    LENGTH,
    OBSERVATION,
    Implementation,
    check_same,
    times,
    weight_policy,
    with_value,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential


def first(collector: Any, batches: int = 1) -> list[Any]:
    """Return copies of the first batches, and close the collector."""
    collected = []
    for batch in collector:
        collected.append(batch.clone())
        if len(collected) == batches:
            break
    collector.shutdown()
    return collected


def needs(implementation: Implementation, *options: str) -> None:
    """Skip a test of options that this version of TorchRL lacks."""
    parameters = inspect.signature(implementation.Collector.__init__).parameters
    if implementation.name == "torchrl" and not parameters.keys() >= set(options):
        pytest.skip("needs a TorchRL that has this option")


def shorter(batch: Any) -> Any:
    return batch[:, :3]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frames_per_batch": 6},
        {"frames_per_batch": 7},
        {"total_frames": 20},
        {"total_frames": 21},
        {"init_random_frames": None},
        {"init_random_frames": 0},
        {"init_random_frames": -1},
        {"frames_per_batch": 6, "set_truncated": True},
        {"postproc": shorter},
        {"frames_per_batch": 14, "split_trajs": True},
        {"trajs_per_batch": 3, "traj_format": "padded"},
        {"trajs_per_batch": 3, "traj_format": "cat"},
        {"track_traj_ids": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_batches_are_the_same(options: Any) -> None:
    check_batches(weight_policy(), **options)


def check_batches(policy: Any, **options: Any) -> None:
    def collect(implementation: Implementation) -> list[Any]:
        needs(implementation, *options)
        make = implementation.batch_of(2, zoo_use_mask=True)
        return first(implementation.collector(make, policy, **options), 2)

    check_same(collect)


def function(td: Any) -> Any:
    """Act with 2, as a function of a TensorDict."""
    for group in ("walker", "goal"):
        observed = td[group, "observation"]
        td[group, "action"] = torch.full(observed.shape[:-1], 2)
    return td


def squares() -> Any:
    """Return a policy with an output that is kept, and one that is not."""
    keys = [("walker", name) for name in ("square", "_square")]
    outputs = [
        TensorDictModule(lambda seen: seen[..., :2] ** 2, [OBSERVATION], [key])
        for key in keys
    ]
    return TensorDictSequential(*outputs, weight_policy())


def counting(td: Any) -> Any:
    """Count frames in what is written, and tell the shapes of the TensorDict."""
    before = td.get("count", None)
    before = torch.zeros(*td.shape, 1) if before is None else before
    td["count"] = before + 1
    td["walker", "ones"] = torch.ones(td["walker"].batch_size)
    return function(td)


def apart(td: Any) -> Any:
    """Return the actions in another TensorDict."""
    td = function(td.clone())
    groups = ("walker", "goal")
    actions = {group: td.select((group, "action"))[group] for group in groups}
    return TensorDict(actions, td.batch_size)


@pytest.mark.parametrize("policy", [function, squares(), counting, apart])
def test_batches_of_any_policy_are_the_same(policy: Any) -> None:
    check_batches(policy)


def test_batches_of_a_policy_factory_are_the_same() -> None:
    check_batches(None, policy_factory=weight_policy)


def test_a_batch_has_the_keys_of_rollout_and_trajectories(
    implementation: Any,
) -> None:
    (batch,) = first(implementation.collector(None, weight_policy()))
    flags = ("done", "terminated", "truncated")
    names: list[tuple[str, ...]] = [(flag,) for flag in flags]
    for group in ("walker", "goal"):
        names += [(group, name) for name in (*flags, "observation")]
    rewards = {("next", group, "reward") for group in ("walker", "goal")}
    actions = {(group, "action") for group in ("walker", "goal")}
    expected = set(names) | {("next", *name) for name in names} | rewards | actions
    keys = batch.keys(include_nested=True, leaves_only=True)
    actual = {key if isinstance(key, tuple) else (key,) for key in keys}
    assert actual == expected | {IDS}


def test_one_environment_has_no_batch_dimension(implementation: Any) -> None:
    make = implementation.make()
    (batch,) = first(implementation.collector(make, None, frames_per_batch=7))
    assert batch.shape == (7,)


def test_an_endless_collector_has_no_length(implementation: Any) -> None:
    collector = implementation.collector()
    with pytest.raises((RuntimeError, TypeError)):
        len(collector)
    collector.shutdown()


def test_policy_and_factory_together_are_a_type_error(implementation: Any) -> None:
    with pytest.raises(TypeError):
        implementation.collector(None, weight_policy(), policy_factory=weight_policy)


def test_long_trajectories_are_truncated(implementation: Any) -> None:
    collector = implementation.collector(
        implementation.batch_of(2, length=99), None, max_frames_per_traj=4
    )
    (batch,) = first(collector)
    assert times(batch).tolist() == 2 * [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    last = batch["next"][times(batch) == 3]
    assert last["truncated"].all()
    assert last["done"].all()
    assert last["walker", "truncated"].all()
    assert not last["terminated"].any()
    steps = batch["next", "step_count"]
    assert steps.dtype == torch.int64
    assert steps.shape == (2, 10, 1)
    assert torch.equal(steps[..., 0].float(), times(batch) + 1)
    assert torch.equal(batch["step_count"][..., 0].float(), times(batch))


def test_environments_may_be_reset_for_every_batch(implementation: Any) -> None:
    collector = implementation.collector(
        None, None, frames_per_batch=6, reset_at_each_iter=True
    )
    batch, next_batch = first(collector, 2)
    assert times(next_batch).tolist() == 2 * [[0, 1, 2]]
    assert not set(batch[IDS].flatten().tolist()) & set(
        next_batch[IDS].flatten().tolist()
    )


@pytest.mark.parametrize("kind", ["RANDOM", "DETERMINISTIC", "MODE", "MEAN", None])
def test_the_policy_acts_with_the_exploration_type(
    implementation: Any, kind: str | None
) -> None:
    from tensordict.nn.probabilistic import interaction_type

    expected = getattr(implementation.ExplorationType, kind or "RANDOM")
    options = {"exploration_type": expected} if kind else {}
    types = set()

    def policy(td: Any) -> Any:
        types.add(interaction_type())
        return function(td)

    collector = implementation.collector(None, policy, **options)
    collection = iter(collector)
    types.clear()
    next(collection)
    collector.shutdown()
    assert types == {expected}


@pytest.mark.torchrl_defect("D17")
def test_a_reset_begins_new_trajectories(implementation: Any) -> None:
    collector = implementation.collector(None, None, frames_per_batch=6)
    collection = iter(collector)
    batch = next(collection).clone()
    collector.reset()
    next_batch = next(collection).clone()
    collector.shutdown()
    assert times(next_batch).tolist() == 2 * [[0, 1, 2]]
    assert not set(batch[IDS].flatten().tolist()) & set(
        next_batch[IDS].flatten().tolist()
    )


@pytest.mark.parametrize("reset", [True, False])
def test_equal_seeds_give_equal_observations(implementation: Any, reset: bool) -> None:
    observations = []
    for seed in (0, 0, 1):
        collector = implementation.collector(None, weight_policy())
        collector.set_seed(seed)
        if reset:
            collector.reset()
        (batch,) = first(collector)
        observations.append(batch[OBSERVATION])
    assert torch.equal(observations[0], observations[1])
    assert not torch.equal(observations[0], observations[2])


def test_set_seed_returns_an_unused_seed(implementation: Any) -> None:
    collector = implementation.collector(None, weight_policy())
    assert collector.set_seed(3) != 3
    assert collector.set_seed(3, static_seed=True) == 3
    (batch,) = first(collector)
    assert not torch.equal(batch[0][OBSERVATION], batch[1][OBSERVATION])


def test_a_state_restores_the_policy_and_the_number_of_frames(
    implementation: Any,
) -> None:
    collector = implementation.collector(None, weight_policy(3.0), total_frames=60)
    next(iter(collector))
    state = collector.state_dict()
    collector.shutdown()
    resumed = implementation.collector(None, weight_policy(), total_frames=60)
    resumed.load_state_dict(state)
    batch, _ = first(resumed, 99)
    assert (batch[ACTION] == 3).all()


def test_the_same_tensordict_may_be_returned(implementation: Any) -> None:
    collector = implementation.collector(None, None, return_same_td=True)
    collection = iter(collector)
    batch, next_batch = next(collection), next(collection)
    collector.shutdown()
    assert batch is next_batch


def test_a_frame_has_the_version_of_its_policy(implementation: Any) -> None:
    collector = implementation.collector(
        implementation.make(), weight_policy(), track_policy_version=True
    )
    collection = iter(collector)
    versions = []
    for _ in range(2):
        batch = next(collection).clone()
        versions.append(batch["policy_version"].unique().tolist())
        collector.update_policy_weights_(with_value(2.0))
    collector.shutdown()
    assert len(versions[0]) == len(versions[1]) == 1
    assert versions[1][0] == versions[0][0] + 1


def test_hooks_run_before_and_after_a_batch(implementation: Any) -> None:
    needs(implementation, "pre_collect_hook")
    calls: list[Any] = []
    collector = implementation.collector(
        None,
        None,
        pre_collect_hook=lambda: calls.append("pre"),
        post_collect_hook=lambda batch: calls.append(batch.shape),
    )
    first(collector)
    assert calls[:2] == ["pre", torch.Size([2, 10])]


def test_the_death_of_an_agent_does_not_end_a_trajectory(implementation: Any) -> None:
    make = implementation.batch_of(2, death=2, zoo_use_mask=True, zoo_done_on_any=False)
    (batch,) = first(implementation.collector(make, None))
    assert len(batch[IDS].unique()) == 2 * 10 // LENGTH


def test_a_policy_that_reads_an_unknown_key_is_an_error(implementation: Any) -> None:
    policy = TensorDictModule(torch.square, ["nothing"], [ACTION])
    with pytest.raises((KeyError, TypeError, RuntimeError)):
        first(implementation.collector(None, policy))


@pytest.mark.parametrize("options", [{}, {"frames_per_batch": 3, "frames": 3}])
def test_missing_and_unknown_arguments_are_type_errors(
    implementation: Any, options: Any
) -> None:
    with pytest.raises(TypeError):
        implementation.Collector(implementation.batch_of(2), None, **options)


def test_a_state_under_next_is_read_in_the_next_frame(implementation: Any) -> None:
    def policy(td: Any) -> Any:
        before = td.get("state", None)
        before = torch.zeros(*td.shape, 1) if before is None else before
        td["state"] = before
        td["next", "state"] = before + 1
        return function(td)

    make = implementation.batch_of(2, length=99)
    (batch,) = first(implementation.collector(make, policy))
    assert torch.equal(batch["next", "state"], batch["state"] + 1)
    assert torch.equal(batch["state"][:, 1:], batch["next", "state"][:, :-1])
