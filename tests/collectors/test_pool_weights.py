"""Everybody acts with the right weights of a pool's versions."""

from typing import Any

import pytest
import torch
from test_pools import Shift, against_the_past
from workloads.counting import CountingEnv

from marl_collect import PolicyPool
from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector

SIZE = 3


def start(kind: Any, **options: Any) -> tuple[Any, PolicyPool]:
    net = Shift()
    pool = PolicyPool(net, size=SIZE, sample="win_rate")
    keywords = {
        "frames_per_batch": 80,
        "seed": 5,
        "num_workers": 2,
        "track_policy_version": True,
        "policies": {"main": net, "past": pool},
        "assign": against_the_past,
    }
    return kind([CountingEnv] * 4, **(keywords | options)), pool


class Run:
    """Trains, and checks that each frame has the weights of its version."""

    def __init__(self, collector: Any, pool: PolicyPool) -> None:
        self.collector, self.pool = collector, pool
        self.held = [self.now()]

    def now(self) -> list[float]:
        networks = (self.pool.policy, *self.pool.members)
        return [policy.weight.item() for policy in networks]

    def update(self, change: Any = None) -> None:
        with torch.no_grad():
            self.pool.policy.weight += 1
            if change is not None:
                change()
        self.collector.update_policy_weights_()
        self.held.append(self.now())

    def collect(self, rounds: int = 1) -> None:
        """Collect until both workers have delivered, this often."""
        for _ in range(rounds):
            waited = set(range(4))  # The environments; a worker has two of them.
            while waited:
                batch = self.collector.next()
                history = torch.tensor(self.held)[batch["policy_version"].squeeze(-1)]
                ids = batch["hunter", "policy_id"]
                expected = history.gather(-1, ids)
                assert (batch["hunter", "weight"] == expected).all()
                waited -= set((batch["collector", "traj_ids"][:, 0] >> 32).tolist())


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (MultiSyncCollector, {}),
    (MultiSyncCollector, {"prefetch": False}),
    (MultiAsyncCollector, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_frame_has_the_weights_of_its_version(kind: Any, options: Any) -> None:
    collector, pool = start(kind, **options)
    with collector:
        run = Run(collector, pool)
        run.collect(2)
        run.update(pool.update)  # At place 1.
        for _ in range(4):
            run.collect(2)
            run.update()
        # Two updates between two batches.
        run.update(pool.update)  # At place 2.
        run.update()
        run.collect(4)
        # Nobody has to tell that a version was changed.
        run.update(lambda: pool.members[0].weight.data.fill_(50))
        run.collect(4)
        run.update()
        run.collect(4)


def test_workers_with_weights_of_their_own_get_later_updates() -> None:
    collector, pool = start(MultiSyncCollector)
    with collector:
        run = Run(collector, pool)
        run.collect()
        run.update(pool.update)
        run.collect()
        changed = {k: v.clone() for k, v in collector.policy.state_dict().items()}
        for index in range(SIZE):
            changed[f"past.members.{index}.weight"].fill_(9)
        collector.update_policy_weights_({1: changed})  # Separates the workers.
        run.held.append(run.now())
        batch = collector.next().clone()
        past = batch["hunter", "policy_id"] > 0
        weights = batch["hunter", "weight"]
        assert past[:2].any()
        assert past[2:].any()
        assert (weights[:2][past[:2]] < 9).all()
        assert (weights[2:][past[2:]] == 9).all()
        run.update()  # Both again, with equal weights.
        run.collect(2)


def test_a_resumed_run_publishes_what_the_state_has() -> None:
    collector, pool = start(MultiSyncCollector)
    with collector:
        run = Run(collector, pool)
        for _ in range(3):
            run.update(pool.update)
            run.collect()
        state = collector.state_dict()
    collector, pool = start(MultiSyncCollector)
    with collector:
        collector.load_state_dict(state)
        resumed_run = Run(collector, pool)
        assert resumed_run.now() == run.now()
        resumed_run.held = list(run.held)
        resumed_run.collect(2)
        resumed_run.update()
        resumed_run.collect(2)


class Counts(Shift):
    """Counts its calls in a frozen parameter, in the place of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, td: Any) -> Any:
        self.calls.add_(1)
        td = super().forward(td)
        td["hunter", "weight"] = td["hunter", "weight"] * 0 + self.calls
        return td


@pytest.mark.parametrize("options", [{}, {"policy_factory": Counts}])
def test_an_update_resets_frozen_parameters_that_workers_have_written(
    options: dict[str, Any],
) -> None:
    policy = Counts()
    with MultiSyncCollector(
        [CountingEnv], policy, frames_per_batch=4, seed=0, total_frames=16, **options
    ) as collector:
        values = []
        for batch in collector:
            values.append(batch["hunter", "weight"][0, :, 0].tolist())
            with torch.no_grad():
                policy.weight.add_(1)
            collector.update_policy_weights_()
    assert [row[-1] - row[0] for row in values] == [3.0] * 4
    assert values[1] == values[2] == values[3]  # Each begins with the trainer's values.
