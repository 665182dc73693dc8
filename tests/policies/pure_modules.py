"""Modules that call a function, and say that it is pure, or do not."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn


class Computes(nn.Module):
    """Calls a function on itself and on observations."""

    pure_forward = True

    def __init__(
        self, call: Callable[[Any, Tensor], Any], buffer: Tensor | None = None
    ) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("table", buffer)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


class Called(Computes):
    """The same, but not declared pure."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


def collected(
    kind: Any, env: Any, module: nn.Module, group: str, out_keys: list[Any]
) -> tuple[dict[Any, Tensor], str]:
    """Return a policy's outputs in two batches, and how they were computed."""
    policy = TensorDictModule(module, [(group, "observation")], out_keys=out_keys)
    with kind([env] * 2, policy, frames_per_batch=40, seed=0) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        joint: Any = torch.cat(batches, 1)
        return {key: joint[key] for key in out_keys}, collector.explain()[0]
