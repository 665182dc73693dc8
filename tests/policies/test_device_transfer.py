"""A policy on another device has the same inputs and outputs."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from marl_collect.models import make_policy
from marl_collect.policies import device_transfer, module

masked = partial(CountingEnv, action_mask=True)


def test_nothing_is_copied_for_a_policy_on_the_cpu() -> None:
    assert device_transfer.transfer_device(None) is None
    assert device_transfer.transfer_device(torch.device("cpu")) is None
    assert device_transfer.transfer_device(torch.device("meta")) == torch.device("meta")


class Acts(torch.nn.Module):
    """A policy that is called, because it is not declared pure."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, td: TensorDictBase) -> Any:
        return self.policy(td)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_policy_on_another_device_acts_like_one_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, recurrent: Any
) -> None:
    """The CPU stands in for the other device."""
    policy = Acts(make_policy(masked(), num_cells=(8,), recurrent=recurrent))
    batches = []
    for device in (None, torch.device("cpu")):
        monkeypatch.setattr(module, "transfer_device", lambda *_, d=device: d)
        with Collector([masked] * 3, policy, frames_per_batch=60, seed=0) as collector:
            batches.append(collector.next().clone())
            assert "is called once per frame" in collector.explain()[0]
    for key in batches[0].keys(True, True):
        assert torch.equal(batches[0][key], batches[1][key]), key


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("recurrent", [None, "lstm"])
def test_collectors_act_on_a_gpu(kind: Any, recurrent: Any) -> None:
    policy = make_policy(masked(), num_cells=(8,), recurrent=recurrent)
    with kind(
        [masked] * 2,
        policy,
        frames_per_batch=40,
        policy_device="cuda",
        check_actions=True,
        seed=0,
    ) as collector:
        for _ in range(3):
            batch = collector.next()
            assert batch["hunter", "observation"].device.type == "cpu"
            assert batch["prey", "action"].std() > 0
            collector.update_policy_weights_()


@pytest.mark.accelerator
def test_a_policy_on_a_gpu_acts_in_parallel_environments() -> None:
    policy = make_policy(masked(), num_cells=(8,)).cuda()

    def collect(**options: Any) -> Any:
        with Collector(
            lambda: ParallelEnv(4, masked, groups=2),
            policy,
            frames_per_batch=80,
            exploration_type=InteractionType.DETERMINISTIC,
            seed=0,
            **options,
        ) as collector:
            return collector.next().clone()

    on_gpu, on_cpu = collect(), collect(policy_device="cpu")
    torch.testing.assert_close(
        on_gpu["hunter", "logits"], on_cpu["hunter", "logits"], atol=1e-4, rtol=1e-3
    )


@pytest.mark.accelerator
def test_a_policy_is_recorded_as_a_cuda_graph() -> None:
    policy = make_policy(masked(), num_cells=(8,), check_mask=False)
    with MultiSyncCollector(
        [masked] * 2,
        policy,
        frames_per_batch=40,
        policy_device="cuda",
        cudagraph_policy=True,
    ) as collector:
        for _ in range(4):
            assert collector.next()["prey", "action"].isfinite().all()
