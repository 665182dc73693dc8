"""Worker processes fill one batch together; their deaths and errors are reported."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.internals import pool_of
from tests_policies import level_policy
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector


def test_training_without_updates_causes_a_warning() -> None:
    policy = level_policy()
    with MultiSyncCollector(CountingEnv, policy, frames_per_batch=8) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.level += 1
        collector.next()
        with pytest.warns(UserWarning, match=r"update_policy_weights_\(\)"):
            collector.next()


def test_workers_map_a_slot_at_the_same_time() -> None:
    """Otherwise each of them that hangs is waited for in turn."""
    with MultiSyncCollector([CountingEnv] * 3, frames_per_batch=6) as collector:
        pool = pool_of(collector)
        receive, waited = pool.receive, []

        def note(workers: Iterable[int]) -> Any:
            waited.append(set(workers))
            return receive(waited[-1])

        pool.receive = note
        collector.next()
        assert waited[0] == {0, 1, 2}


def test_the_number_of_batches_is_unknown_if_workers_are_preempted() -> None:
    options: Any = {"frames_per_batch": 8, "total_frames": 16}
    with (
        MultiSyncCollector(
            [CountingEnv] * 2, preemptive_threshold=0.5, **options
        ) as collector,
        pytest.raises(TypeError, match="has no length"),
    ):
        len(collector)


def test_copies_occupy_no_slot() -> None:
    collector = MultiSyncCollector(
        CountingEnv, frames_per_batch=8, total_frames=80, use_buffers=False
    )
    batches = list(collector)
    assert len({batch["done"].data_ptr() for batch in batches}) == 10
    assert collector.stats()["slots"] == 2


def test_padding_does_not_have_what_was_written_into_an_earlier_batch() -> None:
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=[2, 4]) as collector:
        for _ in range(4):  # More than there are slots.
            batch = collector.next()
            padding = batch[0, 2:].clone()
            assert (padding.pop(("collector", "traj_ids")) == -1).all()
            assert not any(leaf.any() for leaf in padding.values(True, True))
            for leaf in batch.values(True, True):
                leaf.fill_(1)
            del batch, leaf


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_explain_answers_after_the_loop(kind: Any) -> None:
    collector = kind(CountingEnv, level_policy(), frames_per_batch=8, total_frames=16)
    answers = [collector.explain() for _ in collector]
    assert len(answers) == 2
    assert collector.explain() == answers[-1]
    assert "Level" in answers[-1][0]


@pytest.mark.torchrl_defect("D15")
def test_a_fixed_seed_of_environments_causes_a_warning() -> None:
    pytest.importorskip("mpe2")
    from marl_collect.envs import PettingZooEnv

    def make() -> PettingZooEnv:
        return PettingZooEnv("simple_spread_v3", seed=3)

    with pytest.warns(UserWarning, match="pins seed=3 for all 2"):
        MultiSyncCollector([make] * 2, frames_per_batch=8).shutdown()
