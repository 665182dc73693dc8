"""Several policies and pools of past versions on Ray: the data are those of workers."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_tools import DiesOnce, biased, masked, wait_until_nothing_is_in_use
from support.weightless import (
    COPYABLE,
    REFUSED,
    SEED,
    SEEDS_OF_LIST,
    UNCOPYABLE,
    WAYS,
    arguments,
    check_acts_with,
    check_module,
    expected_policy,
    hunters,
)
from support.worlds import CountingWorlds
from tensordict import TensorDict, TensorDictBase
from torch import nn
from workloads.counting import CountingEnv, CountingOptions

from marl_collect import Collector, PolicyPool, RayCollector
from marl_collect.models import make_policy

pytest_plugins = ["support.ray_cluster"]
pytestmark = pytest.mark.usefixtures("cluster")

RAY: dict[str, Any] = {"num_collectors": 2, "envs_per_worker": 2, "sync": True}
Agents = tuple[str, ...]


def half(seed: int, agents: Agents) -> dict[str, str]:
    return {a: "past" if (seed + i) % 2 else "main" for i, a in enumerate(agents)}


def start(kind: Any, create_env_fn: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    net = make_policy(CountingEnv, num_cells=(8,), recurrent="gru")
    policies = {"main": net, "past": PolicyPool(net, size=3, sample="win_rate")}
    keywords = {"policies": policies, "assign": half, "seed": 3, "frames_per_batch": 60}
    return kind(create_env_fn, **(keywords | options))


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


def same(td: TensorDictBase, other_td: TensorDictBase) -> None:
    assert set(td.keys(True, True)) == set(other_td.keys(True, True))
    for key in td.keys(True, True):
        torch.testing.assert_close(td[key], other_td[key], rtol=1e-4, atol=1e-4)


def test_a_pool_on_ray_gives_the_data_of_one_process_and_resumes() -> None:
    with start(Collector, [CountingEnv] * 4) as local:
        expected = batches(local, 5)
        pool = local.policy["past"].state_dict()
    assert set(expected["prey", "policy_id"].unique().tolist()) == {0, 1, 2, 3}
    with start(RayCollector, CountingEnv, **RAY) as uninterrupted:
        same(batches(uninterrupted, 2), expected[:, :30])
        state = copy.deepcopy(uninterrupted.state_dict())
        same(batches(uninterrupted, 3), expected[:, 30:])
        torch.testing.assert_close(uninterrupted.policy["past"].state_dict(), pool)
    with start(RayCollector, CountingEnv, **RAY) as resumed:
        resumed.load_state_dict(state)
        same(batches(resumed, 3), expected[:, 30:])


def test_several_batches_of_an_actor_are_refused_with_the_way() -> None:
    with pytest.raises(TypeError, match="Build one batch with more worlds"):
        start(RayCollector, partial(CountingWorlds, 2), **RAY)


def test_async_actors_act_with_members_of_the_pool() -> None:
    with start(RayCollector, CountingEnv, **(RAY | {"sync": False})) as collector:
        batch = batches(collector, 1)
        # Later, actors that lag may have met only versions that were replaced.
        assert collector.policy["past"].games.sum() > 0
        batch = torch.cat([batch, batches(collector, 3)], 1)
        assert set(batch["prey", "policy_id"].unique().tolist()) <= {0, 1, 2, 3}
    # Nor does a collector that is closed refer to the weights of batches in progress.
    wait_until_nothing_is_in_use()


@pytest.mark.parametrize(("workers", "sync"), [(1, False), (2, True)])
def test_a_replaced_actor_gets_all_weights(
    workers: int, sync: bool, tmp_path: Path
) -> None:
    """With one worker the actor dies, with two one of its workers."""
    envs = [masked, DiesOnce(tmp_path / "died", 50)]
    options: dict[str, Any] = {
        "num_collectors": 2 // workers,
        "num_workers_per_collector": workers,
        "on_worker_failure": "restart",
        "track_policy_version": True,
        "sync": sync,
    }
    net = biased().requires_grad_()
    pool = PolicyPool(net, size=3)
    options["policies"] = {"main": net, "past": pool}
    with start(RayCollector, envs, **options) as collector:
        biases = []
        for number in range(6):
            biases.append([m.module.bias.item() for m in (net, *pool.members)])
            batch = collector.next().clone()
            then = torch.tensor(biases)[batch["policy_version"].squeeze(-1)]
            ids = batch["hunter", "policy_id"]
            assert (batch["hunter", "bias"] == then.gather(-1, ids)).all()
            with torch.no_grad():
                net.module.bias += 1
            if number % 2:
                pool.update()
            collector.update_policy_weights_()
    assert (tmp_path / "died").exists()


class Counts(nn.Module):
    """Counts its calls in a frozen parameter, and writes the number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.calls.add_(1)
        zeros = td["hunter", "observation"][..., 0] * 0
        td["hunter", "action"] = zeros.long()
        td["hunter", "calls"] = zeros + self.calls
        return td


def everybody_counts(seed: int, agents: Agents) -> dict[str, str]:
    del seed
    return dict.fromkeys(agents, "counts")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_resets_frozen_parameters_that_actors_have_written(
    workers: int,
) -> None:
    main = Counts()  # It never acts.
    main.trained = nn.Parameter(torch.zeros(()))
    policies = {"counts": Counts(), "main": main}
    options: dict[str, Any] = {"policies": policies, "assign": everybody_counts}
    ray = RAY | {"num_collectors": 1, "num_workers_per_collector": workers}
    ray |= {"envs_per_worker": 1}
    call_counts = []
    hunters = partial(CountingEnv, CountingOptions(n_prey=0))
    with RayCollector(hunters, **ray, **options, frames_per_batch=8) as collector:
        for _ in range(3):
            call_counts.append(collector.next()["hunter", "calls"][0, :, 0].tolist())
            with torch.no_grad():
                main.trained.add_(1)
            collector.update_policy_weights_()
    assert call_counts[0][-1] > call_counts[0][0]  # The policy wrote it.
    assert call_counts[1] == call_counts[2]
    assert call_counts[1][0] == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", [COPYABLE, [UNCOPYABLE]], ids=["all", "uncopyable"])
def test_lazy_policies_and_those_on_meta_get_the_weights_of_the_seed(
    names: Sequence[str], way: str
) -> None:
    """The column of Ray in the table of ``tests/collectors/test_initialization.py``."""
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
