"""Fused policies in collectors: the same data, and weight updates."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.models.distributions.heads import HeadOptions
from marl_collect.models.policy import make_head

pytestmark = pytest.mark.processes

ENVIRONMENTS = 6


def masked() -> CountingEnv:
    return CountingEnv(action_mask=True)


class Scaled(nn.Module):
    """Elementwise, so results do not depend on the number of rows."""

    pure_forward = True

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, features))
        self.size = size

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(x / 10) * self.weight
        return torch.cat([x, x], -1)[..., : self.size]


class ScaledNormal(Scaled):
    pure_forward = True

    def forward(self, x: torch.Tensor) -> Any:
        loc = super().forward(x)
        return loc, (loc.abs() + 0.1).sqrt()


def policy(normal: type[Scaled] = ScaledNormal) -> TensorDictSequential:
    description = masked().description
    modules: list[Any] = []
    for name, net, keys in (
        ("hunter", Scaled(5, 4), ["logits"]),
        ("prey", normal(3, 2), ["loc", "scale"]),
    ):
        out_keys = [(name, key) for key in keys]
        modules.append(TensorDictModule(net, [(name, "observation")], out_keys))
        head = make_head(description.groups[name], HeadOptions(group=name))
        modules.append(head)
    return TensorDictSequential(*modules)


def collect(kind: Any, policy: Any, **options: Any) -> TensorDict:
    with kind(
        [masked] * ENVIRONMENTS,
        policy,
        frames_per_batch=60,
        total_frames=240,
        seed=3,
        **options,
    ) as collector:
        return torch.cat([batch.clone() for batch in collector], dim=1)


def same(td: TensorDict, other_td: TensorDict) -> bool:
    keys = set(td.keys(True, True))
    return keys == set(other_td.keys(True, True)) and all(
        torch.equal(td[key], other_td[key]) for key in keys
    )


@pytest.mark.parametrize(
    "interaction_type", [InteractionType.RANDOM, InteractionType.DETERMINISTIC]
)
def test_our_heads_give_the_same_data_for_any_distribution_of_environments(
    interaction_type: Any,
) -> None:
    acting = policy()
    expected = collect(Collector, acting, exploration_type=interaction_type)
    for workers in (1, 2, 3):
        actual = collect(
            MultiSyncCollector,
            acting,
            num_workers=workers,
            exploration_type=interaction_type,
        )
        assert same(expected, actual), f"{workers} workers differ"
    assert (expected["hunter", "action_log_prob"] <= 0).all()
    legal = expected["hunter", "action_mask"].gather(
        -1, expected["hunter", "action"].unsqueeze(-1)
    )
    assert legal.all()


def test_the_number_of_frames_per_batch_does_not_change_the_data() -> None:
    def run(frames: int) -> TensorDict:
        batches = Collector(
            [masked] * 2, policy(), frames_per_batch=frames, total_frames=120, seed=1
        )
        return torch.cat([batch.clone() for batch in batches], dim=1)

    expected = run(120)
    for frames in (2, 24, 40):
        assert same(run(frames), expected)


def test_a_class_sent_by_value_keeps_what_it_declares_again() -> None:
    """cloudpickle leaves out attributes that equal those of the base."""

    class Twice(Scaled):
        pure_forward = True

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * 2

    acting = TensorDictSequential(
        TensorDictModule(Twice(5, 4), [("hunter", "observation")], [("hunter", "l")]),
        policy(),
    )
    with MultiSyncCollector([masked], acting, frames_per_batch=9) as collector:
        collector.next()
        (text,) = collector.explain()
    assert text.startswith("Fused")
