"""A policy on another device has the same inputs and outputs."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, set_interaction_type
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from marl_collect.core.description import allocate
from marl_collect.models import make_policy
from marl_collect.policies import device_transfer, module
from marl_collect.policies.device_transfer import Exchange
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import Generators

masked = partial(CountingEnv, action_mask=True)


def test_inputs_and_outputs_are_transferred() -> None:
    sources = [
        torch.arange(6.0).view(2, 3),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int64),
    ]
    exchange = Exchange(sources, torch.device("cpu"))
    for _ in range(2):
        exchange.send()
        for copied, source in zip(exchange.inputs, sources, strict=True):
            assert torch.equal(copied, source)
            assert copied.data_ptr() != source.data_ptr()
        memories = {copied.untyped_storage().data_ptr() for copied in exchange.inputs}
        assert len(memories) == 1
        sources[0].add_(1)
    target = torch.zeros(2, 3, dtype=torch.float64)
    exchange.receive([exchange.inputs[0] * 2], [target])
    assert torch.equal(target, (exchange.inputs[0] * 2).double())


def test_nothing_is_copied_for_a_policy_on_the_cpu() -> None:
    assert device_transfer.transfer_device(None) is None
    assert device_transfer.transfer_device(torch.device("cpu")) is None
    assert device_transfer.transfer_device(torch.device("meta")) == torch.device("meta")


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_policy_on_another_device_acts_like_one_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, recurrent: Any
) -> None:
    """The CPU stands in for the other device."""
    env = masked()
    policy = make_policy(env, num_cells=(8,), recurrent=recurrent)

    def act(device: torch.device | None) -> list[dict[Any, Any]]:
        runner = ModuleRunner(policy, env.description, 3, device)
        memory: dict[Any, Any] = allocate(env.description.row(), (3,))
        memory["hunter", "action_mask"].fill(True)
        runner.probe(memory)
        memory |= allocate(runner.signature.memory(env.description), (3,))
        fields = [*memory]
        if runner.signature.reads_is_init:
            memory["is_init",] = np.zeros((3, 1), np.bool_)
        runner.bind(memory)
        rng = np.random.default_rng(0)
        rows = []
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            runner.begin(4, Generators(0, range(3)))
            for frame in range(4):
                for key in env.description.observed():
                    array = memory[key]
                    if key[-1] == "observation":
                        array[...] = rng.normal(size=array.shape)
                    elif key[-1] in ("mask", "action_mask"):
                        array.fill(True)
                runner.act(frame)
                rows.append({key: memory[key].copy() for key in fields})
        return rows

    expected = act(None)
    monkeypatch.setattr(module, "transfer_device", lambda device: device)
    actual = act(torch.device("cpu"))
    for row, other in zip(actual, expected, strict=True):
        for key, array in row.items():
            np.testing.assert_array_equal(array, other[key], err_msg=str(key))


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
