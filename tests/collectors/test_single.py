"""The content of a batch, with an environment whose numbers can all be recomputed."""

from functools import partial
from typing import Any

import pytest
import torch
from support.scripts import run_mounted
from support.worlds import CountingWorlds
from tensordict import TensorDictBase
from tests_policies import level_policy
from workloads.counting import CountingEnv

from marl_collect import Collector, ParallelEnv, SerialEnv, describe
from marl_collect.errors import PolicyError


def collector(envs: int = 2, frames: int = 40, **options: Any) -> Collector:
    options.setdefault("total_frames", 5 * frames)
    return Collector([CountingEnv] * envs, frames_per_batch=frames, seed=0, **options)


def test_names_and_batch_sizes() -> None:
    """What the oracle does not compare."""
    batch = collector().next()
    assert batch is not None
    assert batch.batch_size == (2, 20)
    assert batch.names == [None, "time"]
    assert batch["hunter"].batch_size == (2, 20, 2)
    assert batch["prey"].names == [None, "time", None]


def test_writing_into_a_batch_changes_no_later_frame() -> None:
    expected = [b.clone() for b in collector(frames=8, total_frames=80)]
    for batch, copy in zip(collector(frames=8, total_frames=80), expected, strict=True):
        assert (batch == copy).all()
        for leaf in batch.values(True, True):
            leaf.fill_(1)


def test_environments_that_differ_are_refused() -> None:
    factories = [CountingEnv, lambda: CountingEnv(n_prey=4)]
    with pytest.raises(ValueError, match="environment 1"):
        Collector(factories, frames_per_batch=8)


def test_random_frames_are_refused_if_the_policy_reshapes_an_observation() -> None:
    def policy(td: TensorDictBase) -> None:
        observation = td["hunter", "observation"]
        td["hunter", "observation"] = observation[..., :2]
        td["hunter", "action"] = (observation[..., 0] * 1009).long() % 4

    with (
        Collector(
            lambda: CountingEnv(n_prey=0),
            policy,
            frames_per_batch=8,
            init_random_frames=8,
        ) as collector,
        pytest.raises(PolicyError, match="changes hunter/observation from .2, 5"),
    ):
        collector.next()


@pytest.mark.mounts
def test_what_is_built_in_inference_mode_works_outside_too() -> None:
    with torch.inference_mode():
        env = CountingEnv()
        env.rollout(2)
        running = collector(policy=level_policy())
        running.next()
    env.rollout(2)
    running.update_policy_weights_()
    batch = running.next()
    assert batch is not None
    assert not any(leaf.is_inference() for leaf in batch.values(True, True))


def test_it_collects_where_proc_is_not_mounted() -> None:
    """As on other systems than Linux: its memory is ordinary memory."""
    code = (
        "from marl_collect import Collector\n"
        "from workloads.counting import CountingEnv\n"
        "with Collector(CountingEnv, frames_per_batch=20, total_frames=40) as it:\n"
        "    print(sum(batch.numel() for batch in it))"
    )
    process = run_mounted("/proc", code)
    assert process.stdout.strip() == "40", process.stderr


K = 3
Worlds = partial(CountingWorlds, K, action_mask=True)
KEYWORDS: Any = {"frames_per_batch": 24 * K, "total_frames": -1, "seed": 5}


def test_worlds_are_described_like_one() -> None:
    assert describe(Worlds) == CountingEnv(action_mask=True).description


@pytest.mark.parametrize("kind", [ParallelEnv, SerialEnv])
def test_joint_environments_refuse_worlds_and_name_the_way(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"CountingWorlds. Pass it to a collector"):
        kind(2, Worlds)


def test_several_batches_in_one_process_are_refused_with_the_way() -> None:
    with pytest.raises(TypeError, match="Build one batch with more worlds"):
        Collector([Worlds] * 2, None, **KEYWORDS)
