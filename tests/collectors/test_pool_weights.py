"""Weights of a pool's versions travel once, and everybody acts with the right ones."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pools import Shift, against_the_past
from workloads.counting import CountingEnv

from marl_collect import PolicyPool
from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.weights.shared import SharedMemoryWeights

SIZE = 3
EACH = "main", "past", "past_0", "past_1", "past_2"


@dataclass
class Noted:
    """Sends weights through shared memory; each worker writes down what it pulls."""

    folder: Path
    inner: Any = None
    owners: tuple[str, ...] = ()

    def open(self, layout: Any) -> Any:
        publisher = SharedMemoryWeights().open(layout)
        first = [layout.names[weights.tensors][0] for weights in layout.ranges]
        paths = [name.split(".") for name in first]
        owners = [f"past_{p[2]}" if len(p) > 3 else p[0] for p in paths]
        note = type(self)(self.folder, publisher.handle, tuple(owners))
        return _Publisher(publisher, note)

    @property
    def layout(self) -> Any:
        return self.inner.layout

    def attach(self, vector: torch.Tensor) -> Any:
        return _Reader(self.inner.attach(vector), self)

    def pulls(self, pid: int) -> list[set[str]]:
        lines = (self.folder / str(pid)).read_text().splitlines()
        return [set(line.split()) for line in lines]


class _Publisher:
    def __init__(self, inner: Any, handle: Noted) -> None:
        self.handle = handle
        self.write, self.read, self.close = inner.write, inner.read, inner.close


class _Reader:
    def __init__(self, inner: Any, note: Noted) -> None:
        self.inner, self.note = inner, note

    def pull(self, place: int, ranges: Any) -> None:
        self.inner.pull(place, ranges)
        with (self.note.folder / str(os.getpid())).open("a") as file:
            print(*sorted({self.note.owners[i] for i in ranges}), file=file)


def start(kind: Any, note: Noted, **options: Any) -> tuple[Any, PolicyPool]:
    net = Shift()
    pool = PolicyPool(net, size=SIZE, sample="win_rate")
    keywords = {
        "frames_per_batch": 80,
        "seed": 5,
        "num_workers": 2,
        "track_policy_version": True,
        "weight_sync_schemes": {"policy": note},
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
def test_a_version_is_pulled_once(kind: Any, options: Any, tmp_path: Path) -> None:
    note = Noted(tmp_path)
    collector, pool = start(kind, note, **options)
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
        pids = collector.worker_pids
    for pid in pids:
        first, *later = note.pulls(pid)
        assert first == set(EACH)
        assert all({"main", "past"} <= pulled for pulled in later)
        versions = [pulled - {"main", "past"} for pulled in later]
        assert [version for version in versions if version] == [
            {"past_1"},
            {"past_2"},
            {"past_0"},
        ]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_restarted_worker_pulls_all_weights(
    kind: Any, options: Any, tmp_path: Path
) -> None:
    note = Noted(tmp_path)
    keywords = options | {"on_worker_failure": "restart"}
    collector, pool = start(kind, note, **keywords)
    with collector:
        run = Run(collector, pool)
        for _ in range(3):
            run.update(pool.update)
            run.collect(2)
        old, other = collector.worker_pids
        os.kill(old, signal.SIGKILL)
        run.update()
        run.collect(4)
        new, same = collector.worker_pids
    assert old != new
    assert other == same
    assert note.pulls(new)[0] == set(EACH)
    # An asynchronous worker may have skipped updates, so it may pull some versions.
    assert note.pulls(other)[-1] != set(EACH)


def test_workers_with_weights_of_their_own_pull_what_changes(tmp_path: Path) -> None:
    note = Noted(tmp_path)
    collector, pool = start(MultiSyncCollector, note)
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
        before = [len(note.pulls(pid)) for pid in collector.worker_pids]
        batch = collector.next().clone()
        past = batch["hunter", "policy_id"] > 0
        weights = batch["hunter", "weight"]
        assert past[:2].any()
        assert past[2:].any()
        assert (weights[:2][past[:2]] < 9).all()
        assert (weights[2:][past[2:]] == 9).all()
        run.update()  # Both again, with equal weights.
        run.collect(2)
        pids = collector.worker_pids
    first_pulls, second_pulls = (
        note.pulls(p)[n:] for p, n in zip(pids, before, strict=True)
    )
    assert first_pulls == [{"main", "past"}]
    assert second_pulls == [set(EACH)] * 2


def test_a_resumed_run_publishes_what_the_state_has(tmp_path: Path) -> None:
    note = Noted(tmp_path)
    collector, pool = start(MultiSyncCollector, note)
    with collector:
        run = Run(collector, pool)
        for _ in range(3):
            run.update(pool.update)
            run.collect()
        state = collector.state_dict()
    collector, pool = start(MultiSyncCollector, note)
    with collector:
        collector.load_state_dict(state)
        resumed_run = Run(collector, pool)
        assert resumed_run.now() == run.now()
        resumed_run.held = list(run.held)
        resumed_run.collect(2)
        resumed_run.update()
        resumed_run.collect(2)
        for pid in collector.worker_pids:
            _, loaded, *later = note.pulls(pid)
            assert loaded == set(EACH)
            assert later == [{"main", "past"}]


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
