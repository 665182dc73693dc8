"""A resumed run equals the uninterrupted one exactly."""

import io
import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collector_tools import wait_until_idle
from tensordict import TensorDict
from tests_policies import acting, level_policy
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import EnvWrapper
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.parallel_env import ParallelEnv, SerialEnv


def unrepeatable() -> CountingEnv:
    """Has ``repeats=False``."""
    env = CountingEnv()
    env._description = replace(env.description, repeats=False)
    return env


class Drifting(EnvWrapper):
    """Uses a generator that its seed does not determine."""

    def __init__(self) -> None:
        super().__init__(CountingEnv(deaths=False, min_length=30, max_length=40))

    def after_step(self) -> None:
        self.row["prey", "observation"][:, 0] += np.random.default_rng().random()


def breaks(batches: list[TensorDict]) -> int:
    """Count frames whose observation differs from the previous frame's next one."""
    frames = torch.cat(batches, -1)
    ids = frames["collector", "traj_ids"]
    same_trajectory = ids[:, 1:] == ids[:, :-1]
    root = frames["prey", "observation"][:, 1:]
    following = frames["next", "prey", "observation"][:, :-1]
    assert same_trajectory.any()
    return int((same_trajectory & (root != following).flatten(2).any(-1)).sum())


def options(**overrides: Any) -> dict[str, Any]:
    return {"frames_per_batch": 22, "max_frames_per_traj": 9, "seed": 4, **overrides}


def through_disk(state: Any) -> Any:
    """Save and load the state like a checkpoint."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream)


class Drawn(nn.Module):
    """Acts with noise from torch's generator of the observations' device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, device = observation.shape[0], observation.device
        hunters = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        return self.level + torch.rand(batch, 3, 2, device=device), hunters


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_draws_from_the_generator_of_a_gpu_continue(kind: Any) -> None:
    build = partial(kind, [CountingEnv] * 2, acting(Drawn()), policy_device="cuda")
    with build(**options()) as first:
        first.next()
        state = through_disk(first.state_dict())
        expected = first.next().clone()
    with build(**options(seed=99)) as second:
        second.load_state_dict(state)
        assert (second.next() == expected).all()


def test_a_reset_begins_new_episodes_everywhere_if_none_can_be_repeated() -> None:
    keywords = options(max_frames_per_traj=None, frames_per_batch=4, prefetch=True)
    with MultiSyncCollector([unrepeatable] * 2, **keywords) as collector:
        collector.next()
        with pytest.warns(UserWarning, match="all environments begin new episodes"):
            collector.reset([False, True])
        assert (collector.next()["prey", "observation"][:, 0, 0, 1] == 0).all()


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (Collector, "policy_state_dict"),
        (MultiSyncCollector, "policy_state_dict"),
        (MultiSyncCollector, "published"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(kind: Any, key: str) -> None:
    keywords = options(frames_per_batch=4, max_frames_per_traj=None)
    env = partial(CountingEnv, deaths=False)
    with kind(env, level_policy(), **keywords) as collector:
        state = collector.state_dict()
        wrong = {"module.level": torch.zeros(2), "module.other": torch.zeros(())}
        state[key] = wrong if key == "policy_state_dict" else [wrong]
        collector.next()
        with pytest.raises(ValueError, match=r"level is \[2\] in the .* but \[\]"):
            collector.load_state_dict(state)
        assert (collector.next()["prey", "observation"][:, 0, 0, 1] > 0).all()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_the_last_trajectories_are_resumed_one_batch_at_a_time(kind: Any) -> None:
    """When ``total_frames`` are collected, several batches remain."""

    def ids(batch: TensorDict) -> list[int]:
        return [int(i) for i in batch["collector", "traj_ids"][:, 0]]

    keywords = options(frames_per_batch=50, total_frames=100, trajs_per_batch=3)
    states = []
    with kind([CountingEnv] * 2, None, **keywords) as first:
        states.append(first.state_dict())
        expected = []
        while (batch := first.next()) is not None:
            expected.append(ids(batch))
            states.append(first.state_dict())
    frames = [state["frames"] for state in states]
    assert frames.count(100) > 2
    assert len(expected[-1]) < 3
    # One collector, so each state also replaces what remains of the one before.
    with kind([CountingEnv] * 2, None, **keywords) as second:
        for number, state in enumerate(states):
            second.load_state_dict(through_disk(state))
            batch = second.next()
            remaining = [] if batch is None else [ids(batch)]
            assert remaining == expected[number : number + 1]
        second.load_state_dict(states[-3])
        second.set_seed(5)
        assert second.next() is None  # The rest is of the old seed.
        second.load_state_dict(states[-3])
        assert [ids(batch) for batch in second] == expected[-2:]


@pytest.mark.parametrize("shape", [{}, {"trajs_per_batch": 2}])
def test_rates_count_the_seconds_of_earlier_runs(shape: dict[str, Any]) -> None:
    names = ["frames_per_second"]
    names += [f"seconds_{what}" for what in ("collecting", "in_rollouts", "in_resets")]
    with MultiSyncCollector(CountingEnv, None, **options(**shape)) as first:
        first.next()
        expected = first.stats()
        state = through_disk(first.state_dict())
    with MultiSyncCollector(CountingEnv, None, **options(**shape)) as second:
        second.next()
        second.load_state_dict(state)
        stats = second.stats()
        assert all(stats[name] == expected[name] > 0 for name in names)


@pytest.mark.parametrize(
    ("saved", "built", "words"),
    [
        ({"trajs_per_batch": 4}, {}, "this collector has no trajs_per_batch"),
        ({}, {"trajs_per_batch": 4}, "The state has no trajectories"),
        ({"split_trajs": True}, {"trajs_per_batch": 1}, "has no trajectories"),
        (
            {"trajs_per_batch": 4},
            {"trajs_per_batch": 4, "max_frames_per_traj": 5},
            r"dtypes differ in \[.*step_count",
        ),
        (
            {"trajs_per_batch": 4, "max_frames_per_traj": 5},
            {"trajs_per_batch": 4},
            r"dtypes differ in \[.*step_count",
        ),
        (
            {"envs_per_worker": 4},
            {"envs_per_worker": 2},
            r"has 1 worker with \[4\] environments, but .* 1 worker with \[2\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    saved: dict[str, Any], built: dict[str, Any], words: str
) -> None:
    keywords: dict[str, Any] = {"frames_per_batch": 12, "seed": 1}
    with Collector(CountingEnv, level_policy(), **saved, **keywords) as first:
        first.next()
        state = first.state_dict()
    with Collector(
        CountingEnv, policy := level_policy(), **built, **keywords
    ) as second:
        policy.load_state_dict({"module.level": torch.ones(())})
        with pytest.raises(ValueError, match=words):
            second.load_state_dict(state)
        assert second.frames == 0
        assert policy.state_dict()["module.level"] == 1
        second.next()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_reset_idx_has_one_bool_per_worker(kind: Any) -> None:
    """A ``Collector`` counts as one worker."""
    workers = 1 if kind is Collector else 2
    keywords = options(frames_per_batch=2 * workers, max_frames_per_traj=None)
    env = partial(CountingEnv, deaths=False, min_length=40, max_length=40)

    def episodes() -> list[int]:
        ids = collector.next()["collector", "traj_ids"]
        assert (ids == ids[:, :1]).all()
        return [int(number) & 0xFFFFFFFF for number in ids[:, 0]]

    with kind([env] * workers, **keywords) as collector:
        assert episodes() == [0] * workers
        wrong: Any
        for wrong in ([1], [0] * workers, [True] * (workers + 1), [], [[True]], "ab"):
            with pytest.raises(
                ValueError, match=rf"each of the {workers} workers.*\[True"
            ):
                collector.reset(wrong)
        assert episodes() == [0] * workers
        expected = [0] * workers
        for last in (False, True, False):
            mask: Any = torch.zeros(workers).bool()
            mask[-1] = last
            collector.reset(mask)
            expected[-1] += last
            assert episodes() == expected


LOOSE = {"frames_per_batch": 8, "max_frames_per_traj": None}


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_environment_whose_replay_differs_begins_a_new_episode(kind: Any) -> None:
    with kind([Drifting] * 2, None, **options(**LOOSE)) as first:
        batches = [first.next().clone() for _ in range(2)]
        state = through_disk(first.state_dict())
    with kind([Drifting] * 2, None, **options(**LOOSE)) as second:
        with pytest.warns(UserWarning, match=r"repeats=False") as record:
            second.load_state_dict(state)
        assert [w.filename for w in record] == [__file__]
        batches += [second.next().clone() for _ in range(2)]
        assert second.stats()["cut_trajectories"] == [0, 1 << 32]
    assert breaks(batches) == 0
    ids = torch.cat(batches, -1)["collector", "traj_ids"]
    assert ids[0].tolist() == [0] * 8 + [1] * 8


def test_a_partial_reset_keeps_no_trajectory_whose_replay_differs() -> None:
    keywords = options(**LOOSE, prefetch=True)
    with MultiSyncCollector([Drifting] * 2, None, **keywords) as collector:
        batches = [collector.next().clone()]
        with pytest.warns(UserWarning, match="was replayed") as record:
            collector.reset([False, True])
        assert [w.filename for w in record] == [__file__]
        batches += [collector.next().clone() for _ in range(2)]
        assert collector.stats()["cut_trajectories"] == [0]
    assert breaks(batches) == 0
    ids = torch.cat(batches, -1)["collector", "traj_ids"]
    assert ids[:, -1].tolist() == [1, (1 << 32) + 1]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (MultiSyncCollector, {}),
        (MultiSyncCollector, {"prefetch": True}),
        (MultiAsyncCollector, {}),
    ],
)
def test_a_collector_continues_from_a_state_that_was_taken_after_losing_a_worker(
    kind: Any, extra: dict[str, Any], finished: bool
) -> None:
    """The worker may be lost after its next batch is finished but not received."""

    def own(collector: Any) -> TensorDict:
        """The next batch of worker 1."""
        while True:
            batch = collector.next()
            rows = batch["collector", "traj_ids"][:, 0] >> 32 == 1
            if rows.any():
                return batch[rows].clone()

    keywords = options(on_worker_failure="restart", frames_per_batch=8, **extra)
    envs = [CountingEnv] * 2
    with kind(envs, None, **keywords) as first:
        before = own(first)["collector", "traj_ids"].max()
        if finished:
            wait_until_idle(first)
        os.kill(first.worker_pids[1], signal.SIGKILL)
        state = through_disk(first.state_dict())
        expected = [own(first) for _ in range(2)]
    with kind(envs, None, **keywords) as second:
        second.load_state_dict(state)
        assert second.stats()["cut_trajectories"] == []
        for batch in expected:
            assert (own(second) == batch).all()
    assert int(expected[0]["collector", "traj_ids"].min()) > int(before)


def test_a_state_can_be_loaded_with_a_lower_limit_of_frames() -> None:
    env = partial(CountingEnv, deaths=False, min_length=200, max_length=200)
    build = partial(Collector, [env] * 2, frames_per_batch=30, seed=0)
    with build(max_frames_per_traj=40) as before:
        for _ in range(2):
            before.next()  # 30 frames of each environment.
        state = before.state_dict()
    with build(max_frames_per_traj=20) as after:
        after.load_state_dict(state)
        batch = torch.cat([after.next().clone() for _ in range(4)], 1)
    # The running episodes are cut at once, and those after them every 20 frames.
    ends = batch["next", "truncated"][..., 0].nonzero().tolist()
    assert ends == [[k, t] for k in range(2) for t in (0, 20, 40)]


FIVE: dict[str, Any] = {
    "one by one": [partial(CountingEnv, action_mask=True, state=True)] * 5,
    "serial": lambda: SerialEnv(5, partial(CountingEnv, action_mask=True, state=True)),
    "in groups": lambda: ParallelEnv(
        *(5, partial(CountingEnv, action_mask=True, state=True)),
        num_processes=2,
        groups=2,
    ),
}


@pytest.mark.parametrize("saved_by", FIVE)
def test_a_state_can_be_loaded_however_environments_are_stepped(saved_by: str) -> None:
    """Groups of a ``ParallelEnv`` have the rollouts of their part each."""
    keywords = options(frames_per_batch=45, policy=level_policy())
    with Collector(FIVE[saved_by], **keywords) as first:
        first.next()
        state = through_disk(first.state_dict())
        expected = first.next().clone()
    for name, factories in FIVE.items():
        with Collector(factories, **keywords) as second:
            for _ in range(2):
                second.load_state_dict(state)
                assert (second.next() == expected).all(), name
            assert second.stats()["episodes"] == first.stats()["episodes"]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_state_in_memory_stays_as_it_was_when_training_goes_on(kind: Any) -> None:
    policy = level_policy()
    with kind(CountingEnv, policy, frames_per_batch=8) as collector:
        state = collector.state_dict()
        batch = collector.next().clone()
        for level in (5.0, 6.0):  # The second takes the memory of the first weights.
            with torch.no_grad():
                policy.module.level.fill_(level)
            collector.update_policy_weights_()
        collector.load_state_dict(state)
        assert policy.module.level.item() == 0.0
        again = collector.next()
        assert (again["prey", "action"] == batch["prey", "action"]).all()
