"""What the tests of collecting on Ray share: environments, policies, a quiet Ray."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from marl_collect.testing.counting import CountingEnv

STORE = 100_000_000


def masked() -> CountingEnv:
    return CountingEnv(action_mask=True, deaths=True, state=True)


def only_hunters() -> CountingEnv:
    return CountingEnv(n_prey=0, deaths=False, max_length=9)


def elementwise_policy(td: TensorDictBase) -> TensorDictBase:
    """Act by comparisons and sums of few terms: no matrix product is involved."""
    seen = td.get(("hunter", "observation"))
    td.set(("hunter", "action"), (seen[..., 0] * 1009).long() % 4)
    prey = td.get(("prey", "observation"))
    td.set(("prey", "action"), prey[..., :2] * 2 - 1)
    td.set(("prey", "extra"), prey[..., 1] + prey[..., 2])
    return td


class Bias(nn.Module):
    """Acts on what it sees and one weight, which the batch then tells."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(
        self, seen: torch.Tensor, prey: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number = (seen[..., 0] * 1009).round() + self.bias
        bias = torch.zeros_like(number) + self.bias
        return number.long() % 4, prey[..., :2] * 2 - 1, bias


def biased(bias: float = 0.0) -> TensorDictModule:
    policy = TensorDictModule(
        Bias(),
        in_keys=[("hunter", "observation"), ("prey", "observation")],
        out_keys=[("hunter", "action"), ("prey", "action"), ("hunter", "bias")],
    )
    policy.module.bias.fill_(bias)
    return policy


def joined(batches: list[Any]) -> Any:
    return torch.cat([batch.clone() for batch in batches], dim=1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def ray_processes() -> set[int]:
    """Process ids of what Ray runs for this test."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith((b"ray::", b"/")) and b"raylet/raylet" in command:
                found.add(int(entry.name))
    return found


@contextmanager
def local_ray(cpus: int = 8) -> Iterator[Any]:
    """Run Ray on this machine, as a user's script would who starts it himself."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=cpus,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
