"""What a recording cannot see, repeat or compare; rows of single agents.

That settings of every kind act in the next batch is tested by the oracle.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.policies import by_row

OBSERVATION, ACTION = ("prey", "observation"), ("prey", "action")


def acting(net: nn.Module) -> TensorDictModule:
    out_keys = [ACTION, ("hunter", "action")]
    return TensorDictModule(net, in_keys=[OBSERVATION], out_keys=out_keys)


class DrawsWithoutUse(nn.Module):
    pure_forward = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.rand(3)
        action = torch.randn(x.shape[0], 3, 2) + 0 * x[..., :2]
        return action, torch.zeros(x.shape[0], 2, dtype=torch.int64)


def test_values_that_cannot_be_compared_are_never_repeated() -> None:
    class Draws(DrawsWithoutUse):
        pure_forward = True

        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)

    with Collector(CountingEnv, acting(Draws()), frames_per_batch=8) as collector:
        collector.next()
        (text,) = collector.explain()
        assert "module.rng (" in text
        assert "cannot be seen" in text


class DrawsAndCalls(DrawsWithoutUse):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x)


def test_draws_that_are_not_used_are_made_all_the_same() -> None:
    batches = []
    for kind in (DrawsWithoutUse, DrawsAndCalls):
        with Collector(CountingEnv, acting(kind()), frames_per_batch=16) as collector:
            torch.manual_seed(0)
            batches.append(collector.next()["prey", "action"].clone())
            text = collector.explain()[0]
            assert ("draws random numbers that it does not use (rand)" in text) == (
                kind is DrawsWithoutUse
            )
    assert torch.equal(*batches)


class Masks(nn.Module):
    """Its output is not finite for random observations."""

    pure_forward = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bad = x[..., :2] * float("nan")
        return 0 * x[..., :2], torch.zeros(x.shape[0], 2, dtype=torch.int64), bad


def test_outputs_that_are_not_finite_prove_nothing() -> None:
    out_keys = [ACTION, ("hunter", "action"), ("prey", "bad")]
    policy = TensorDictModule(Masks(), in_keys=[OBSERVATION], out_keys=out_keys)
    with Collector(CountingEnv, policy, frames_per_batch=4) as collector:
        collector.next()
        assert "is not finite for random observations" in collector.explain()[0]


def test_bounds_near_the_largest_number_are_compared() -> None:
    from gymnasium import spaces

    from marl_collect.core.description import (
        EnvDescription,
        GroupDescription,
        allocate,
    )
    from marl_collect.policies.fused.random_frames import RandomFrames

    largest = float(np.finfo(np.float32).max)
    for dtype in (np.float32, np.float64):
        box: Any = spaces.Box(-largest, largest, (4,), dtype)
        group = GroupDescription(("a", "b"), box, spaces.Discrete(2))
        description = EnvDescription("wide", {"g": group})
        memory = allocate(description.row(), (3,))
        RandomFrames(description, memory).draw()
        numbers = memory["g", "observation"]
        assert (np.abs(numbers) < 100).all()
        assert len(np.unique(numbers)) > 10


# Rows of single agents

ALONE = "Runs on the rows of its agents only"


class Half(nn.Module):
    """Says that it treats rows alike, but mixes agents."""

    pure_forward = by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.share * x.mean(-2, keepdim=True)


def of_two(network: Any) -> dict[str, Any]:
    from marl_collect.models import MultiAgentMLP, make_policy

    def build(n_in: int, n_out: int, n: int, **_: Any) -> nn.Module:
        mlp = MultiAgentMLP(
            n_in, n_out, n, centralised=False, share_params=True, num_cells=(8,)
        )
        return nn.Sequential(network(), mlp)

    def seeded(seed: int) -> Any:
        torch.manual_seed(seed)
        return make_policy(CountingEnv(), network=build)

    return {"main": seeded(0), "rival": seeded(1)}


def assign(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    return {a: ("main", "rival")[(seed >> i) % 2] for i, a in enumerate(agents)}


def test_copies_of_a_policy_that_lies_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After every change of settings, the copies are compared again."""
    locs = []
    for worth in (True, False):
        monkeypatch.setattr(by_row, "is_worth_it", lambda *_, w=worth: w)
        alone, batch = with_shares(0.0, 1.0)
        assert alone == [worth, False]
        locs.append(batch["prey", "loc"])
    torch.testing.assert_close(*locs, rtol=1e-4, atol=1e-5)


def with_shares(*shares: float) -> tuple[list[bool], Any]:
    """Return whether rows were computed alone, for each share, and the last batch."""
    policies = of_two(Half)
    halves = [m for net in policies.values() for m in net.modules() if type(m) is Half]
    for half in halves:
        half.share = shares[0]
    texts, batches = [], []
    with Collector(
        [CountingEnv] * 2, policies=policies, assign=assign, frames_per_batch=20, seed=0
    ) as collector:
        for share in shares:
            for half in halves:
                half.share = share
            batches.append(collector.next().clone())
            texts.append(collector.explain()[0])
    return [ALONE in text for text in texts], batches[-1]


def test_mistakes_of_this_package_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistaken(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(by_row, "is_worth_it", lambda *_: True)
    monkeypatch.setattr(by_row, "sizes_of_runs", mistaken)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        Collector(
            CountingEnv,
            policies=of_two(nn.Identity),
            assign=assign,
            frames_per_batch=10,
        )


def test_a_policy_s_own_rows_are_compared_with_all_rows() -> None:
    seven = {"g": np.eye(7, dtype=np.bool_)}
    all_of_it = {"g": np.ones((4, 7), np.bool_)}
    alike = {"g": True}
    for flops, worth in ((0.0, False), (1e5, True), (1e7, True)):
        assert by_row.is_worth_it(seven, alike, 8, flops) == worth
        assert not by_row.is_worth_it(all_of_it, alike, 8, flops)
    # A copy for each agent needs seven runs, which pays for large networks only.
    assert not by_row.is_worth_it(seven, {"g": False}, 8, 1e5)
    assert by_row.is_worth_it(seven, {"g": False}, 8, 1e7)
