"""A policy whose settings change is recorded again as often as that pays."""

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.policies.fused.runner import RecordingBudget

FREE = 10
"""Recordings that need not pay."""


def test_a_recording_that_saves_nothing_is_not_repeated() -> None:
    budget = RecordingBudget()
    for _ in range(FREE):
        budget.record(seconds=1.0, saving=float("nan"))
    assert not budget.allows(1_000_000)


class Levels(nn.Module):
    """Acts with an attribute, and with a number that it reads from a buffer."""

    pure_forward = True

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hunters = torch.zeros(len(x), 2, dtype=torch.int64)
        return 0 * x[..., :2] + self.level + self.step.item(), hunters


def attribute(net: Any) -> None:
    net.level += 1.0


def read(net: Any) -> None:
    net.step += 1.0


def replace(net: Any) -> None:
    net.step = net.step + 1


@pytest.mark.parametrize("change", [attribute, read, replace])
def test_a_policy_is_called_while_recordings_do_not_pay(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RecordingBudget.record

    def priced(budget: RecordingBudget, seconds: float, saving: float) -> None:
        """Let every recording cost as much as 20 frames save."""
        assert seconds > 0
        record(budget, 20.0, 1.0)

    monkeypatch.setattr(RecordingBudget, "record", priced)
    net = Levels()
    policy = TensorDictModule(
        net,
        in_keys=[("prey", "observation")],
        out_keys=[("prey", "action"), ("hunter", "action")],
    )
    for frames, pays in ((8, False), (32, True)):
        with Collector(CountingEnv, policy, frames_per_batch=frames) as collector:

            def explains(collector: Any = collector) -> str:
                """Collect a batch, check it, and return how the policy acted."""
                actions = collector.next()["prey", "action"]
                assert (actions == net.level + net.step).all()
                text: str = collector.explain()[0]
                return text

            assert explains().startswith("Fused")
            for number in range(1, 15):
                change(net)
                is_fused = explains().startswith("Fused")
                assert is_fused == (pays or number < FREE), number
            if pays:
                continue
            assert "change so often that recording it again" in explains()
            # 24 frames since the last change.
            assert explains().startswith("Fused")
            assert explains().startswith("Fused")
