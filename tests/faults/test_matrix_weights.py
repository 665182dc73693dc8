"""A replaced worker acts with the weights whose version its frames name.

The table is failure x where the policy comes from x number of updates before it.
"""

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fault_tools import kill
from support.internals import pool_of
from support.processes import wait_until, wait_until_gone
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv, Fault

from marl_collect import PolicyPool, RayCollector
from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors.worker_policy import WorkerPolicy
from marl_collect.processes.shared_memory import Segment
from marl_collect.weights.shared import WeightVector

pytest_plugins = ["support.ray_cluster"]
WORKERS = 2
FAILING = 1  # Index of the worker that fails.
SOURCES = ["policy", "policy_factory", "list", "pool"]
MODES: list[Any] = [
    pytest.param(MultiSyncCollector, {}, id="sync"),
    pytest.param(MultiSyncCollector, {"prefetch": True}, id="prefetch"),
    pytest.param(MultiAsyncCollector, {}, id="async"),
]


class Tells(nn.Module):
    """Writes its weight and its setting beside every action."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.setting = 0.0

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = observation[..., 0] * 0
        return zeros.long(), zeros + self.weight, zeros + self.setting


def tells(weight: float = 3.0) -> TensorDictModule:
    keys = [("hunter", name) for name in ("action", "weight", "setting")]
    return TensorDictModule(Tells(weight), [("hunter", "observation")], keys)


def half(seed: int, agents: Sequence[str]) -> dict[str, str]:
    return {a: "past" if (seed + i) % 2 else "main" for i, a in enumerate(agents)}


class Published:
    """A collector's policy, and every version of its weights.

    Attributes:
        arguments: of the collector.
        versions: by version and worker the weight and the setting of each policy, in
            the order of ``policy_id``. Settings are sent if the collector has the
            policy itself.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._net = tells()
        self._pool = PolicyPool(self._net, size=2)
        self.arguments: dict[str, Any] = {
            "policy": {"policy": self._net},
            "policy_factory": {"policy_factory": tells},
            "list": {"policy_factory": [partial(tells, 3.0), partial(tells, 4.0)]},
            "pool": {
                "policies": {"main": self._net, "past": self._pool},
                "assign": half,
            },
        }[source]
        first = [self._numbers] * WORKERS
        if source == "list":
            first = [[[3.0, 0.0]], [[4.0, 0.0]]]
        self.versions = [first]

    @property
    def _numbers(self) -> list[list[float]]:
        nets: list[Any] = [self._net]
        if self._source == "pool":
            nets += self._pool.members
        return [[net.module.weight.item(), net.module.setting] for net in nets]

    def update(self, collector: Any, worker: int | None = None) -> None:
        """Train, and publish the weights to all workers or to one."""
        with torch.no_grad():
            self._net.module.weight += 10
        if self._source in ("policy", "pool"):
            self._net.module.setting += 1
        if self._source == "pool":
            self._pool.update()
        weights = None if collector.policy is not None else self._net
        collector.update_policy_weights_(weights, worker_ids=worker)
        assert collector.policy_version == len(self.versions)
        before = self.versions[-1]
        self.versions.append(
            [
                self._numbers if worker in (None, index) else before[index]
                for index in range(WORKERS)
            ]
        )

    def change_setting(self) -> float:
        """Change the setting of the policy, without an update; return it."""
        self._net.module.setting += 1
        return float(self._net.module.setting)

    @property
    def model_id(self) -> str | None:
        """Which of the collector's policies is trained."""
        return "main" if self._source == "pool" else None

    def check(self, batch: TensorDict) -> set[int]:
        """Compare every frame with the version that it names; return the workers."""
        workers = set()
        for row in batch.unbind(0):
            worker = int(row["collector", "traj_ids"][0]) >> 32
            ids = row.get(("hunter", "policy_id"), torch.zeros(len(row), 2)).long()
            of_worker = torch.tensor([version[worker] for version in self.versions])
            of_frame = of_worker[row["policy_version"].squeeze(-1)]  # [T, policies, 2]
            expected = of_frame.gather(1, ids[..., None].expand(-1, -1, 2))
            assert torch.equal(row["hunter", "weight"], expected[..., 0])
            assert torch.equal(row["hunter", "setting"], expected[..., 1])
            workers.add(worker)
        return workers


class Failure:
    """Makes the environment of one worker fail on request, once per request."""

    def __init__(self, folder: Path, harm: Callable[[], None]) -> None:
        self._request, self._harm = folder / "request", harm

    def __call__(self) -> CountingEnv:
        return CountingEnv(n_prey=0, fault=Fault(self._fail, repeat=True))

    def _fail(self) -> None:
        if self._request.exists():
            self._request.unlink()
            self._harm()

    def request(self) -> None:
        self._request.touch()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(kind: Any, factory: Any, published: Published, **options: Any) -> Any:
    return kind(
        [partial(CountingEnv, n_prey=0), factory],
        **{"policy": None} | published.arguments,
        frames_per_batch=8,
        track_policy_version=True,
        seed=0,
        **options,
    )


def restarts_of(collector: Any) -> int:
    """Return how many workers, or actors, were replaced."""
    stats = collector.stats()
    restarts: int = stats["restarts"] + stats.get("worker_restarts", 0)
    return restarts


def collect(
    collector: Any,
    published: Published,
    restarts: int,
    workers: Iterable[int] = (FAILING,),
) -> None:
    """Collect until workers were replaced, and the new ones have delivered a batch."""
    while restarts_of(collector) < restarts:
        published.check(collector.next())
    missing = set(workers)
    while missing:
        missing.difference_update(published.check(collector.next()))


def fail_after_each_update(
    collector: Any, published: Published, fail: Callable[[], None]
) -> None:
    """Let the worker fail before an update, after one and two, and after its own."""
    collect(collector, published, 0)
    for number, worker in enumerate((None, None, FAILING, None)):
        fail()
        collect(collector, published, number + 1)
        published.update(collector, worker)
        collect(collector, published, 0)


@pytest.mark.parametrize(("kind", "options"), MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_worker_that_dies_within_a_batch(
    source: str, kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    failure, published = Failure(tmp_path, die), Published(source)
    options = {"on_worker_failure": "restart", **options}
    with start(kind, failure, published, **options) as collector:
        fail_after_each_update(collector, published, failure.request)


def fail_within_updates(
    collector: Any, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the worker die before the trainer writes an update, and right after it."""
    write = WeightVector._copy

    def die_and_write(*args: Any) -> None:
        kill(pool_of(collector).pids[FAILING])
        write(*args)

    def write_and_die(*args: Any) -> None:
        write(*args)
        kill(pool_of(collector).pids[FAILING])

    for writes, worker in itertools.product(
        (die_and_write, write_and_die), (None, FAILING, 1 - FAILING)
    ):
        before = restarts_of(collector)
        with monkeypatch.context() as patch:
            patch.setattr(WeightVector, "_copy", writes)
            published.update(collector, worker)
        collect(collector, published, before + 1)


@pytest.mark.parametrize("source", SOURCES)
def test_a_worker_that_dies_within_an_update(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published(source)
    factory = partial(CountingEnv, n_prey=0)
    options = {"on_worker_failure": "restart"}
    with start(MultiSyncCollector, factory, published, **options) as collector:
        fail_within_updates(collector, published, monkeypatch)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("source", ["list", "pool"])  # The others are parts of these.
def test_workers_and_actors_that_die_on_ray(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first batch, within updates, and before an update is read."""
    published = Published(source)
    factory = partial(CountingEnv, n_prey=0)
    options = {"sync": True, "max_restarts": -1}
    with start(RayCollector, factory, published, **options) as collector:
        kill(pool_of(collector).pids[FAILING])
        collect(collector, published, 1)
        fail_within_updates(collector, published, monkeypatch)
        for worker in (FAILING, None):
            before = restarts_of(collector)
            published.update(collector, worker)
            kill(collector.actors[FAILING]["pid"])
            collect(collector, published, before + 1)


class Larger(Tells):
    """Has a further parameter."""

    def __init__(self) -> None:
        super().__init__(3.0)
        self.more = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_worker_whose_factory_builds_other_tensors_is_an_error(
    kind: Any, tmp_path: Path
) -> None:
    died = tmp_path / "died"

    def build() -> TensorDictModule:
        policy: Any = tells()
        if died.exists():
            policy.module = Larger()
        return policy

    options = {"frames_per_batch": 20, "on_worker_failure": "restart"}
    env = partial(CountingEnv, n_prey=0)
    with kind(env, policy_factory=build, num_workers=1, **options) as collector:
        died.touch()
        pids = collector.worker_pids
        kill(*pids)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'module\.more' is missing in the"):
                collector.next()
        wait_until_gone([*pids, *collector.worker_pids])


# Updates that wait for nobody


class Waits:
    """Lets a step wait for a file; an update that waits for the step never ends."""

    def __init__(self, folder: Path) -> None:
        self.go, self.waiting = folder / "go", folder / "waiting"

    def __call__(self) -> None:
        self.waiting.touch()
        while not self.go.exists():
            Event().wait(0.005)


class WaitsBeforeCopying:
    """Lets a worker wait before it copies its weights, on request."""

    def __init__(self, folder: Path) -> None:
        self.request, self.waits = folder / "request", Waits(folder)

    def __call__(self) -> CountingEnv:
        request, waits, pull = self.request, self.waits, WorkerPolicy._pull

        def wait_and_pull(*args: Any) -> None:
            if request.exists():
                waits()
            pull(*args)

        pull_with: Any = WorkerPolicy
        pull_with._pull = wait_and_pull
        return CountingEnv(n_prey=0)


@pytest.mark.torchrl_defect("D6")
@pytest.mark.parametrize("source", SOURCES)
def test_a_slot_is_not_written_until_a_worker_has_copied_it(
    source: str, tmp_path: Path
) -> None:
    published, factory = Published(source), WaitsBeforeCopying(tmp_path)
    with start(MultiSyncCollector, factory, published, prefetch=True) as collector:
        published.check(collector.next())
        factory.request.touch()
        published.update(collector)
        published.check(collector.next())
        wait_until(factory.waits.waiting.exists)
        for worker in (None, FAILING, 0, None, None):
            published.update(collector, worker)
        factory.waits.go.touch()
        for version in (1, 6):
            batch = collector.next()
            published.check(batch)
            assert (batch["policy_version"] == version).all()


# Updates that fail


@pytest.mark.parametrize("source", ["policy", "pool"])
def test_an_update_that_is_refused_sends_no_setting(source: str) -> None:
    published = Published(source)
    wrong = {"module.weight": torch.zeros(2)}
    factory = partial(CountingEnv, n_prey=0)
    with start(MultiSyncCollector, factory, published) as collector:
        published.check(collector.next())
        setting = published.change_setting()
        with pytest.raises(ValueError, match="Nothing was copied"):
            collector.update_policy_weights_(wrong, model_id=published.model_id)
        for _ in range(2):
            assert published.check(collector.next())
        assert collector.policy_version == 0
        published.update(collector)
        batch = collector.next()
        assert published.check(batch)
        assert batch["hunter", "setting"].max() > setting


@pytest.mark.parametrize("places", [0, 1])
@pytest.mark.parametrize("source", ["policy", "policy_factory"])
def test_an_update_that_fails_leaves_every_worker_with_its_weights(
    source: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one place more, the weights of one worker are written when it fails."""
    published, left = Published(source), [0]
    create = Segment.create

    def limited(size: int, what: str) -> Segment:
        if not left[0]:
            raise MemoryError("no memory is left")
        left[0] -= 1
        return create(size, what)

    with MultiSyncCollector(
        [partial(CountingEnv, n_prey=0)] * 3,
        **{"policy": None} | published.arguments,
        frames_per_batch=12,
        track_policy_version=True,
    ) as collector:

        def check(version: int, expected: list[float]) -> None:
            batch = collector.next()
            assert (batch["policy_version"] == version).all()
            rows = batch["hunter", "weight"].flatten(1)
            assert (rows == torch.tensor(expected)[:, None]).all()

        check(0, [3.0, 3.0, 3.0])
        weights = {index: tells(5.0 + index) for index in range(2)}
        left[0] = places
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "create", limited)
            with pytest.raises(MemoryError, match="no memory is left"):
                collector.update_policy_weights_(weights)
        check(0, [3.0, 3.0, 3.0])
        collector.update_policy_weights_(weights | {2: tells(9.0)})
        check(1, [5.0, 6.0, 9.0])


class Rectified(Tells):
    """Has the same weights, and one more submodule."""

    def __init__(self) -> None:
        super().__init__(3.0)
        self.extra = nn.ReLU()


def test_changed_settings_are_not_set_in_a_policy_of_another_structure() -> None:
    def other() -> TensorDictModule:
        policy: Any = tells()
        policy.module = Rectified()
        return policy

    acting: Any = tells()
    factory = partial(CountingEnv, n_prey=0)
    with MultiSyncCollector(
        factory, acting, policy_factory=other, frames_per_batch=10
    ) as collector:
        collector.update_policy_weights_()  # Weights alone fit.
        assert (collector.next()["hunter", "setting"] == 0).all()
        acting.module.setting = 5.0
        collector.update_policy_weights_()
        with pytest.raises(ValueError, match="builds other submodules than policy has"):
            collector.next()
