"""Updates reach the workers that they name, in every form, under one version."""

import io
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests_policies import level_policy
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.publish import WorkerWeights
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.errors import ClosedError
from marl_collect.weights.shared import SharedMemoryWeights, WeightVector

WORKERS = 3
PARTS = ("first", "second")
Numbers = npt.NDArray[np.float64]
"""Weight and shift of each part, ``[2, 2]``."""


class Part(nn.Module):
    """A weight, and a buffer that no state_dict has."""

    shift: torch.Tensor

    def __init__(self, level: float = 0.0, shift: float = 0.0) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(level))
        self.register_buffer("shift", torch.tensor(shift), persistent=False)


class Pair(nn.Module):
    """A module on tensors, which collectors wrap. Each hunter acts with a part."""

    def __init__(self, numbers: Any = ((0.0, 0.0), (0.0, 0.0))) -> None:
        super().__init__()
        self.first, self.second = (Part(*map(float, part)) for part in numbers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        acts = [part.level + part.shift for part in (self.first, self.second)]
        return (torch.stack(acts) % 4).long().expand(observation.shape[:-1])

    def numbers(self) -> Numbers:
        parts = (self.first, self.second)
        return np.array([[part.level.item(), part.shift.item()] for part in parts])


def arrays(pair: Pair) -> dict[str, Any]:
    weights = TensorDict.from_module(pair).flatten_keys(".").items()
    return {f"module.{name}": tensor.detach().numpy() for name, tensor in weights}


FORMS: dict[str, Callable[[Pair], Any]] = {
    "module": lambda pair: pair,
    "TensorDict": TensorDict.from_module,
    "arrays": arrays,
    "state_dict": lambda pair: pair.state_dict(),
}


class Updated:
    """A collector, and the numbers and the version that each worker acts with."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.random = np.random.default_rng(seed)
        workers = 1 if kind == "Collector" else WORKERS
        self.numbers = np.zeros((workers, 2, 2))
        self.versions, self.version = np.zeros(workers, np.int64), 0
        self.start()

    def start(self) -> None:
        self.trainer = None if self.kind == "policy_factory" else Pair()
        make: Any = Collector if self.kind == "Collector" else MultiSyncCollector
        policy = {"policy": self.trainer} if self.trainer else {"policy_factory": Pair}
        envs = [partial(CountingEnv, n_prey=0)] * WORKERS
        options: Any = {"frames_per_batch": 6, "track_policy_version": True}
        self.collector = make(envs, **policy, **options)

    def whole(self) -> tuple[Any, Numbers]:
        """Return weights of the whole policy in some form, and their numbers."""
        numbers = self.random.integers(0, 4, (2, 2)).astype(np.float64)
        # Without the trainer's module nobody knows the shifts that it lacks.
        form = self.random.choice(list(FORMS)[: 4 if self.trainer else 3])
        weights = FORMS[form](Pair(numbers))
        if self.trainer and form == "state_dict":
            numbers[:, 1] = self.trainer.numbers()[:, 1]
        return weights, numbers

    def parts(self, *names: str) -> tuple[dict[str, Any], Numbers]:
        """Return weights of parts by name, and those of the whole policy with them."""
        assert self.trainer is not None
        numbers, weights = self.trainer.numbers(), dict[str, Any]()
        for name in names:
            if len(names) > 1 and self.random.random() < 0.3:
                weights[f"module.{name}"] = None  # This one stays.
                continue
            part = self.random.integers(0, 4, 2).astype(np.float64)
            numbers[PARTS.index(name)] = part
            level, shift = torch.from_numpy(part).float()
            weights[f"module.{name}"] = {"level": level, "shift": shift}
        return weights, numbers

    def workers(self) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
        """Return the argument that names one worker, some or all, and their indices."""
        everyone = np.arange(len(self.versions))
        if self.random.random() < 0.4:
            return {}, everyone
        chosen = self.random.permutation(everyone)
        chosen = chosen[: self.random.integers(1, len(chosen) + 1)]
        one = len(chosen) == 1 and self.random.random() < 0.5
        return {"worker_ids": chosen[0] if one else chosen.tolist()}, chosen

    def update(self) -> None:
        """Update some or all workers in one of the ways that there are."""
        ways = ["whole", "policy", "by worker"]
        ways += ["own", "part", "parts"] * (self.trainer is not None)
        way = self.random.choice(ways)
        arguments, chosen = self.workers()
        keyword = self.random.choice(["policy_or_weights", "weights", "policy"])
        before = self.trainer.numbers() if self.trainer else np.zeros((2, 2))
        numbers = [before] * len(chosen)
        if way == "by worker":
            by_worker = [self.whole() for _ in chosen]
            numbers = [of_worker for _, of_worker in by_worker]
            pairs = zip(chosen, by_worker, strict=True)
            arguments = {keyword: {index: weights for index, (weights, _) in pairs}}
        elif way != "own":
            names = {"part": PARTS[:1], "parts": PARTS}.get(way)
            names = names and self.random.permutation(names).tolist()
            weights, of_all = self.parts(*names) if names else self.whole()
            numbers = [of_all] * len(chosen)
            if way == "part":
                ((arguments["model_id"], weights),) = weights.items()
            elif way == "parts":
                keyword = "weights_dict"
            elif way == "policy":
                arguments["model_id"] = "policy"
            arguments[keyword] = weights
        self.collector.update_policy_weights_(**arguments)
        self.version += 1
        self.numbers[chosen], self.versions[chosen] = numbers, self.version
        if self.trainer:
            acts_itself = self.kind == "Collector"
            after = self.numbers[0] if acts_itself else before
            assert (self.trainer.numbers() == after).all()

    def train(self) -> None:
        """Change the trainer's module in place, or replace its tensors."""
        if self.trainer is None:
            return
        part = self.trainer.get_submodule(self.random.choice(PARTS))
        level, shift = self.random.integers(0, 4, 2).astype(np.float64).tolist()
        if self.random.random() < 0.5:
            part.level = nn.Parameter(torch.tensor(level))
            part.shift = torch.tensor(shift)
        else:
            with torch.no_grad():
                part.level.fill_(level)
                part.shift.fill_(shift)
        if self.kind == "Collector":
            self.numbers[0] = self.trainer.numbers()

    def give(self, weights: Any, numbers: Numbers, *chosen: int) -> None:
        """Update some workers, or all."""
        self.collector.update_policy_weights_(weights, worker_ids=chosen or None)
        self.version += 1
        indices = list(chosen or range(len(self.versions)))
        self.numbers[indices], self.versions[indices] = numbers, self.version

    def resume(self, *, alike: bool) -> None:
        """Continue in another collector, from weights of any dtype.

        Args:
            alike: whether the second worker, which has its own version, has the weights
                of the others.
        """
        if self.kind != "Collector":
            weights, numbers = self.whole()
            self.give(weights, numbers)
            if not alike:
                weights, numbers = self.whole()
            self.give(weights, numbers, 1)
        state = io.BytesIO()
        torch.save(self.collector.state_dict(), state)
        state.seek(0)
        loaded = torch.load(state)
        if self.kind != "Collector":
            published = loaded["published"]
            assert len(published) == (1 if alike else WORKERS)
            loaded["published"] = [
                {name: tensor.double() for name, tensor in weights.items()}
                for weights in published
            ]
        self.collector.shutdown()
        before = self.trainer.numbers() if self.trainer else np.zeros((2, 2))
        self.start()
        self.collector.load_state_dict(loaded)
        before[:, 1] = 0  # As in torch, a module's buffers that are not persistent.
        if self.trainer:
            assert (self.trainer.numbers() == before).all()
        if self.kind == "Collector":
            self.numbers[0] = before

    def check(self) -> None:
        """Collect a batch, and compare its actions and versions."""
        batch = self.collector.next()
        assert self.collector.policy_version == self.version
        for index, row in enumerate(batch):
            worker = index % len(self.versions)
            expected = torch.from_numpy(self.numbers[worker].sum(-1)) % 4
            assert (row["hunter", "action"] == expected).all()
            for frame in (row, row["next"]):
                assert (frame["policy_version"] == self.versions[worker]).all()


@pytest.mark.torchrl_defect("D12")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["Collector", "policy", "policy_factory"])
def test_updates_reach_whom_they_name(kind: str, seed: int) -> None:
    if kind != "Collector":  # There the module that is trained acts itself.
        warnings.filterwarnings("ignore", "The policy's parameters have changed")
    running = Updated(kind, seed)
    for step in range(20):
        running.train()
        if step in (6, 14):
            running.resume(alike=step == 6)
        elif step % 4:
            running.update()
        running.check()
    running.collector.shutdown()
    for closed in ("update_policy_weights_", "increment_version"):
        with pytest.raises(ClosedError, match="was shut down"):
            getattr(running.collector, closed)()


WEIGHTS = arrays(Pair())
SOURCES = ("policy_or_weights", "weights", "policy", "weights_dict")
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (TypeError, {"worker_ids": wrong}, r"indices of workers, such as \[0, 2")
        for wrong in (True, [False, True], "0", 1.0, [0.0], object())
    ),
    *((ValueError, {"worker_ids": k}, f"worker {k} of ") for k in (3, -1)),
    (ValueError, {"worker_ids": []}, "no worker"),
    (ValueError, {"weights": {0: WEIGHTS, 3: WEIGHTS}}, "worker 3 of "),
    (TypeError, {"weights": {True: WEIGHTS}}, "indices of workers"),
    (ValueError, {"weights": {0: WEIGHTS}, "worker_ids": [0]}, "by worker"),
    (ValueError, {"policy": {0: WEIGHTS}, "model_id": "module"}, "by worker"),
    (KeyError, {"weights_dict": {"critic": {}}}, "no submodule 'critic'"),
    *(
        (TypeError, {"weights_dict": wrong}, "weights_dict must map paths of sub")
        for wrong in ("policy", [WEIGHTS])
    ),
    (
        *(ValueError, {"model_id": "module", "weights_dict": {"policy": WEIGHTS}}),
        "model_id='module' .* omit model_id",
    ),
    (
        KeyError,
        {"weights": WEIGHTS | {"more": np.ones(1)}},
        "surplus .'(module.)?more'",
    ),
    *(
        (ValueError, {name: {np.int64(0): WEIGHTS} for name in pair}, "only one")
        for pair in itertools.combinations(SOURCES, 2)
    ),
]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_update_that_names_nothing_is_refused(kind: Any) -> None:
    envs = [partial(CountingEnv, n_prey=0)] * 2
    with kind(envs, Pair(), frames_per_batch=8) as collector:
        for error, arguments, text in REFUSED:
            with pytest.raises(error, match=text):
                collector.update_policy_weights_(**arguments)
        assert collector.policy_version == 0
        assert (collector.next()["hunter", "action"] == 0).all()


def test_a_state_dict_of_what_only_workers_have_lacks_buffers() -> None:
    envs = [partial(CountingEnv, n_prey=0)] * 2
    with MultiSyncCollector(envs, policy_factory=Pair, frames_per_batch=8) as collector:
        with pytest.raises(KeyError, match="missing .'module.first.shift'.*pass the m"):
            collector.update_policy_weights_(Pair().state_dict())
        assert collector.policy_version == 0


def test_weights_are_received_from_a_source() -> None:
    class Source:
        def receive(self) -> Any:
            return {"module.level": torch.tensor(5.0)}

    with MultiSyncCollector(
        [CountingEnv] * 2,
        level_policy(),
        frames_per_batch=8,
        weight_sync_schemes={"policy": SharedMemoryWeights()},
        weight_recv_schemes={"policy": Source()},
    ) as collector:
        collector.next()
        collector.receive_weights()
        assert (collector.next()["prey", "action"] == 5.0).all()


def test_weights_that_only_workers_have_are_not_published_before_each_batch() -> None:
    with (
        MultiSyncCollector(
            CountingEnv,
            frames_per_batch=8,
            policy_factory=level_policy,
            update_at_each_batch=True,
        ) as collector,
        pytest.raises(RuntimeError, match="this process has no weights of it"),
    ):
        collector.next()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_weights_that_are_loaded_before_the_first_batch_act_in_it(
    kind: Any, replaced: bool, resumed: bool
) -> None:
    def build() -> tuple[Any, Any]:
        policy = level_policy()
        keywords = {"frames_per_batch": 8, "update_at_each_batch": True}
        return policy, kind(CountingEnv, policy, **keywords)

    policy, collector = build()
    with collector:
        if replaced:
            policy.module.level = nn.Parameter(torch.tensor(5.0))
        else:
            policy.load_state_dict({"module.level": torch.tensor(5.0)})
        state = collector.state_dict()
        if not resumed:
            assert (collector.next()["prey", "action"] == 5.0).all()
            assert collector.policy_version == 1
            return
    policy, collector = build()
    with collector:
        collector.load_state_dict(state)
        assert (collector.next()["prey", "action"] == 5.0).all()
        assert collector.policy_version == 1


STEPS = st.tuples(
    st.sampled_from(["update", "update one", "order", "read"]),
    st.integers(0, WORKERS - 1),
)


@given(st.lists(STEPS, max_size=30))
def test_no_update_overwrites_weights_that_a_worker_still_has_to_read(
    steps: list[tuple[str, int]],
) -> None:
    last_read = [0] * WORKERS
    orders: list[Any] = [None] * WORKERS  # That each worker has not carried out yet.
    has = [0.0] * WORKERS
    policy = TrainerPolicy(level_policy())
    options = CollectorOptions(CountingEnv, frames_per_batch=1)
    published = WorkerWeights(
        policy, options, WORKERS, WeightVector, last_read.__getitem__
    )
    for worker in range(WORKERS):
        published.policy_for(worker)
    for action, worker in steps:
        if action.startswith("update"):
            value = torch.tensor(float(published.version + 1))
            chosen = [worker] if action == "update one" else None
            published.publish(([value], chosen))
        elif action == "order" and orders[worker] is None:
            orders[worker] = published.order(worker)
        elif action == "read" and orders[worker] is not None:
            order, orders[worker] = orders[worker], None
            if order.weights_slot is not None:
                (level,) = published._vector.tensors(order.weights_slot)
                has[worker] = float(level)
            last_read[worker] = order.order
            assert has[worker] == order.version
    published.close()
