"""Environments and policies for the tests of collecting on Ray."""

import gc
import os
from pathlib import Path
from typing import Any

import torch
from support.processes import PATIENCE, wait_until
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv, Fault, Kind

SHARED: dict[str, Any] = {
    "max_frames_per_traj": 9,
    "track_policy_version": True,
    "seed": 3,
}


def masked(fault: Fault | None = None) -> CountingEnv:
    return CountingEnv(action_mask=True, deaths=True, state=True, fault=fault)


def slow(seconds: float = 0.02) -> CountingEnv:
    return masked(Fault("sleep", repeat=True, seconds=seconds))


def raising() -> CountingEnv:
    return masked(Fault("raise", at=7))


def hanging() -> CountingEnv:
    return masked(Fault("hang", at=7))


class DiesOnce:
    """Builds an environment that kills its process; the next one is healthy."""

    def __init__(self, marker: Path, at: int, fault: Kind = "kill") -> None:
        self.marker, self.fault = str(marker), Fault(fault, at=at)

    def __call__(self) -> CountingEnv:
        if Path(self.marker).exists():
            return masked()
        Path(self.marker).touch()
        return masked(self.fault)


class Bias(nn.Module):
    """Acts on what it sees and one weight, which the batch then tells.

    By comparisons and sums of few terms: no matrix product is involved.
    """

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias), requires_grad=False)

    def forward(
        self, hunter: torch.Tensor, prey: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number = (hunter[..., 0] * 1009).round() + self.bias.round()
        bias = torch.zeros_like(number) + self.bias
        return number.long() % 4, prey[..., :2] * 2 - 1, bias


def biased(bias: float = 0.0) -> TensorDictModule:
    return TensorDictModule(
        Bias(bias),
        in_keys=[("hunter", "observation"), ("prey", "observation")],
        out_keys=[("hunter", "action"), ("prey", "action"), ("hunter", "bias")],
    )


def train(collector: Any) -> None:
    """Change the policy, and update the workers."""
    collector.policy.module.bias.add_(1)
    collector.update_policy_weights_()


def assert_same(actual: Any, expected: Any) -> None:
    assert set(actual.keys(True, True)) == set(expected.keys(True, True))
    assert actual.batch_size == expected.batch_size
    assert actual.names == expected.names
    different = [
        key
        for key in expected.keys(True, True, is_leaf=None)
        if not bool((actual[key] == expected[key]).all())
    ]
    assert different == []


def environments(batch: Any) -> list[int]:
    """Index of the environment of each row."""
    return (batch["collector", "traj_ids"][:, 0] >> 32).tolist()


def wait_until_nothing_is_in_use(*, cpus: float = 0.0, nbytes: float = 0.0) -> None:
    """Wait until no actor holds a CPU, and no object is left, on the whole cluster.

    Args:
        cpus: that may be held.
        nbytes: of objects that may be left.
    """
    import ray

    gc.collect()  # Tracebacks of earlier tests may refer to objects.
    limits = {"CPU": cpus, "object_store_memory": nbytes}
    in_use: dict[str, float] = {}

    def nothing() -> bool:
        total, free = ray.cluster_resources(), ray.available_resources()
        for name in limits:
            in_use[name] = total.get(name, 0) - free.get(name, 0)
        return all(in_use[name] <= limit for name, limit in limits.items())

    try:
        # Ray's processes report what is free, so it takes as long as all they do.
        wait_until(nothing, seconds=PATIENCE)
    except AssertionError as error:
        worker: Any = ray._private.worker.global_worker
        raise AssertionError(
            f"actors or objects are left: {in_use}; this process refers to "
            f"{worker.core_worker.get_all_reference_counts()}"
        ) from error


def kill(pid: int) -> None:
    os.kill(pid, 9)
