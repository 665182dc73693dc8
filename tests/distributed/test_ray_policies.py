"""Several policies and pools of past versions on Ray: the data are those of workers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ray_tools import wait_until_nothing_is_in_use
from support.weightless import (
    COPYABLE,
    REFUSED,
    SEED,
    SEEDS_OF_LIST,
    UNCOPYABLE,
    arguments,
    check_acts_with,
    check_module,
    expected_policy,
    hunters,
)
from support.worlds import CountingWorlds
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import PolicyPool, RayCollector
from marl_collect.models import make_policy

pytest_plugins = ["support.ray_cluster"]
pytestmark = pytest.mark.usefixtures("cluster")

RAY: dict[str, Any] = {"num_collectors": 2, "envs_per_worker": 2, "sync": True}
Agents = tuple[str, ...]


def half(seed: int, agents: Agents) -> dict[str, str]:
    return {a: "past" if (seed + i) % 2 else "main" for i, a in enumerate(agents)}


def start(create_env_fn: Any, **options: Any) -> Any:
    net = make_policy(CountingEnv, num_cells=(8,), recurrent="gru")
    policies = {"main": net, "past": PolicyPool(net, size=3, sample="win_rate")}
    keywords = {"policies": policies, "assign": half, "seed": 3, "frames_per_batch": 60}
    return RayCollector(create_env_fn, **(RAY | keywords | options))


def batches(collector: Any, count: int) -> TensorDict:
    collected = []
    for _ in range(count):
        collected.append(collector.next().clone())
        with torch.no_grad():
            for weight in collector.policy["main"].parameters():
                weight.mul_(-1.1)
        collector.policy["past"].update()
        collector.update_policy_weights_()
    return torch.cat(collected, 1)


def test_several_batches_of_an_actor_are_refused_with_the_way() -> None:
    with pytest.raises(TypeError, match="Build one batch with more worlds"):
        start(partial(CountingWorlds, 2))


def test_async_actors_act_with_members_of_the_pool() -> None:
    with start(CountingEnv, sync=False) as collector:
        batch = batches(collector, 1)
        # Later, actors that lag may have met only versions that were replaced.
        assert collector.policy["past"].games.sum() > 0
        batch = torch.cat([batch, batches(collector, 3)], 1)
        assert set(batch["prey", "policy_id"].unique().tolist()) <= {0, 1, 2, 3}
    # Nor does a collector that is closed refer to the weights of batches in progress.
    wait_until_nothing_is_in_use()


@pytest.mark.parametrize(
    ("names", "way"),
    [
        (COPYABLE, "both"),
        (COPYABLE, "list"),
        ([UNCOPYABLE], "policy"),
        ([UNCOPYABLE], "policy_factory"),
    ],
    ids=["all-both", "all-list", "uncopyable-policy", "uncopyable-policy_factory"],
)
def test_lazy_policies_and_those_on_meta_get_the_weights_of_the_seed(
    names: Sequence[str], way: str
) -> None:
    """Of the column of Ray in the table of ``tests/collectors/test_initialization.py``.

    The other cells differ before weights are stored, as they do for local workers.
    """
    chosen = arguments(names, way, 2)
    passed = chosen.get("policy")
    options: dict[str, Any] = {"num_collectors": 1, "num_workers_per_collector": 2}
    options |= {"sync": True, "frames_per_batch": 8, "seed": SEED}
    options["preload"] = ["torchrl.modules"]
    if UNCOPYABLE in names and passed is not None:
        with pytest.raises(ValueError, match=REFUSED):
            RayCollector(hunters, **options, **chosen)
        return
    with RayCollector(hunters, **options, **chosen) as collector:
        batch = collector.next()
        for index in range(2):
            seed = SEEDS_OF_LIST[index if way == "list" else 0]
            check_acts_with(expected_policy(names, passed, seed), names, batch[index])
        if passed is None:
            assert collector.policy is None
        else:
            check_module(collector.policy, passed, expected_policy(names, passed))
