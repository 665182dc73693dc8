"""Fused policies in collectors: the same data, and weight updates."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.models.distributions.heads import HeadOptions
from marl_collect.models.policy import make_head, make_policy

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


class UnsaidNormal(ScaledNormal):
    """The same policy, but called, because it is not declared as pure."""

    pure_forward = False


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


def test_called_and_fused_policies_give_the_same_data_except_last_bits() -> None:
    fused = collect(Collector, policy())
    called = collect(Collector, policy(UnsaidNormal))
    assert set(fused.keys(True, True)) == set(called.keys(True, True))
    for key, value in fused.items(True, True):
        torch.testing.assert_close(value, called[key], rtol=1e-4, atol=1e-4)


def test_the_number_of_frames_per_batch_does_not_change_the_data() -> None:
    def run(frames: int) -> TensorDict:
        batches = Collector(
            [masked] * 2, policy(), frames_per_batch=frames, total_frames=120, seed=1
        )
        return torch.cat([batch.clone() for batch in batches], dim=1)

    expected = run(120)
    for frames in (2, 24, 40):
        assert same(run(frames), expected)


@pytest.fixture
def trained() -> Iterator[Any]:
    torch.manual_seed(0)
    return make_policy(masked().description, num_cells=(8,))


def check_written(policy: Any, batch: Any) -> None:
    """Check that the module's outputs equal those in the batch."""
    with torch.no_grad():
        for group, keys in (("hunter", ["logits"]), ("prey", ["loc", "scale"])):
            recomputed = policy[group][0](batch.select((group, "observation")))
            for key in keys:
                torch.testing.assert_close(
                    batch[group, key], recomputed[group, key], rtol=1e-4, atol=1e-5
                )
            dist = policy[group].get_dist(batch)
            torch.testing.assert_close(
                batch[group, "action_log_prob"],
                dist.log_prob(batch[group, "action"]),
                rtol=1e-4,
                atol=1e-4,
            )


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_new_weights_are_used_from_the_next_batch_on(kind: Any, trained: Any) -> None:
    workers = {} if kind is Collector else {"num_workers": 2}
    with kind(
        [masked] * 4, trained, frames_per_batch=40, total_frames=160, **workers
    ) as collector:
        before = None
        for batch in collector:
            check_written(trained, batch)
            logits = batch["hunter", "logits"].clone()
            assert before is None or (logits != before).any()
            before = logits
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            collector.update_policy_weights_()


def test_a_collector_in_this_process_uses_optimised_and_replaced_weights(
    trained: Any,
) -> None:
    collector = Collector(
        [masked] * 2, trained, frames_per_batch=20, seed=0, update_at_each_batch=True
    )
    optimiser = torch.optim.Adam(trained.parameters(), lr=0.1)
    for round_ in range(4):
        batch = collector.next()
        assert batch is not None
        check_written(trained, batch)
        loss = trained["prey"](batch.clone())["prey", "loc"].square().sum()
        loss.backward()
        optimiser.step()
        if round_ == 1:
            state = {k: v * 0.5 for k, v in trained.state_dict().items()}
            trained.load_state_dict(state, assign=True)
            optimiser = torch.optim.Adam(trained.parameters(), lr=0.1)
    collector.shutdown()


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
