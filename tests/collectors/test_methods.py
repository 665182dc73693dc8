"""Arguments, methods and combinations that other files do not test."""

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from collector_tools import collect_from_all
from support.internals import pool_of
from tensordict.nn import TensorDictModule
from tests_policies import Level, acting, level_policy
from workloads.counting import CountingEnv, CountingError, Fault, UnpicklableError

from marl_collect import Collector, EnvWrapper, MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
)
from marl_collect.collectors.arguments import sized_workers
from marl_collect.errors import WorkerError, worker_error_of

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
WORKERS = [MultiSyncCollector, MultiAsyncCollector]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def counting_threads() -> Any:
    env: Any = CountingEnv()
    env.threads = torch.get_num_threads()
    return env


@pytest.mark.torchrl_defect("D22")
@pytest.mark.parametrize("kind", WORKERS)
def test_threads_of_the_trainer_and_of_the_workers(kind: Any, threads: int) -> None:
    with kind([counting_threads] * 2, frames_per_batch=10) as collector:
        assert collector.getattr_env("threads") == [[1], [1]]
        assert torch.get_num_threads() == threads
    with kind(
        [counting_threads] * 2,
        frames_per_batch=10,
        num_threads=threads + 1,
        num_sub_threads=2,
    ) as collector:
        assert collector.getattr_env("threads") == [[2], [2]]
        assert torch.get_num_threads() == threads + 1


@every_kind
def test_attributes_of_the_policy_can_be_read(kind: Any) -> None:
    with kind(
        CountingEnv, level_policy(), num_workers=1, frames_per_batch=10
    ) as collector:
        assert collector.getattr_policy("in_keys") == [("prey", "observation")]
        assert collector.get_model() is collector.policy
        assert isinstance(collector.get_model("module"), Level)
        with pytest.raises(KeyError, match="no submodule 'critic'"):
            collector.get_model("critic")
        collector.increment_version()
        collector.increment_version()
        assert collector.policy_version == 2
        with pytest.raises(AttributeError, match="nonsense"):
            collector.getattr_policy("nonsense")


class Sealed:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sealed, ()


def sealed() -> None:
    raise OSError("this value is sealed")


class Awkward:
    """Has properties that raise errors, or whose values cannot be sent."""

    @property
    def fails(self) -> int:
        raise ValueError("not yet known")

    @property
    def fails_oddly(self) -> int:
        raise UnpicklableError("odd")

    @property
    def lock(self) -> Any:
        return threading.Lock()

    @property
    def sealed(self) -> Any:
        return Sealed()


class AwkwardEnv(Awkward, EnvWrapper):
    """An environment with these properties."""


class AwkwardPolicy(Awkward, TensorDictModule):
    """A policy with these properties."""


def awkward_policy() -> AwkwardPolicy:
    policy = level_policy()
    return AwkwardPolicy(policy.module, policy.in_keys, policy.out_keys)


def awkward_env() -> AwkwardEnv:
    return AwkwardEnv(CountingEnv())


ERRORS = [
    ("fails", ValueError, "not yet known"),
    ("fails_oddly", WorkerError, "odd"),
    ("misspelt", AttributeError, "misspelt"),
    ("lock", TypeError, "pickle"),
    ("sealed", OSError, "is sealed"),
]


@pytest.mark.parametrize("kind", WORKERS)
def test_an_attribute_that_fails_is_an_error_and_the_collector_lives(kind: Any) -> None:
    with kind(
        [awkward_env] * 2, policy_factory=awkward_policy, frames_per_batch=10, seed=0
    ) as collector:
        pids = collector.worker_pids
        batches = [collector.next().clone()]
        asks = ("getattr_env", "getattr_policy")
        for ask, (name, error, text) in itertools.product(asks, ERRORS):
            with pytest.raises(error, match=text) as info:
                getattr(collector, ask)(name)
            cause = worker_error_of(info.value)
            if name in ("fails", "fails_oddly"):
                assert cause is not None
                assert cause.worker == 0
                assert cause.pid == pids[0]
                assert f"in {name}" in cause.remote_traceback
            batches.append(collector.next().clone())
        assert collector.worker_pids == pids
        assert collector.stats()["restarts"] == 0
        state = collector.state_dict()
        collector.load_state_dict(state)
    if kind is MultiSyncCollector:
        envs = [CountingEnv] * 2
        with kind(envs, level_policy(), frames_per_batch=10, seed=0) as undisturbed:
            for batch in batches:
                assert (undisturbed.next() == batch).all()


@pytest.mark.parametrize("kind", WORKERS)
def test_replies_to_a_call_that_could_not_be_sent_to_all_are_dropped(kind: Any) -> None:
    """The other worker has the call, and its reply is not that to the next one."""
    with kind([counting_threads] * 2, frames_per_batch=10, seed=0) as collector:
        collector.next()
        state = collector.state_dict()
        state["workers"][1]["note"] = threading.Lock()
        for _ in range(2):
            with pytest.raises(TypeError, match="pickle"):
                collector.load_state_dict(state)
        assert collector.getattr_env("threads") == [[1], [1]]
        with pytest.raises(TypeError, match="pickle"):
            collector.load_state_dict(state)
        batches = [collector.next().clone() for _ in range(4)]
        assert all(len(batch) for batch in batches)
        assert collector.getattr_env("threads") == [[1], [1]]


def test_an_error_in_closing_does_not_hide_that_of_the_block() -> None:
    factory = partial(CountingEnv, fault=Fault("raise", "close"))
    with (
        pytest.raises(KeyError, match="first") as info,
        Collector(factory, frames_per_batch=4),
    ):
        raise KeyError("first")
    assert any("fault in close" in note for note in info.value.__notes__)
    with (
        pytest.raises(CountingError, match="fault in close"),
        Collector(factory, frames_per_batch=4),
    ):
        pass


class OneThread(Level):
    """Holds an object that cannot be copied or pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_policy_that_cannot_be_copied_acts_itself_in_a_collector() -> None:
    policy = acting(OneThread())
    with pytest.warns(UserWarning, match="cannot be copied .*lock.* itself") as record:
        collector = Collector(CountingEnv, policy, frames_per_batch=10)
    assert len(record) == 1
    assert record[0].filename == __file__
    with collector:
        assert collector.policy is policy
        with torch.no_grad():
            policy.module.level.fill_(0.25)
        assert (collector.next()["prey", "action"] == 0.25).all()
    with pytest.raises(TypeError, match="policy_factory"):
        MultiSyncCollector(CountingEnv, policy, num_workers=1, frames_per_batch=10)


@pytest.mark.parametrize("kind", WORKERS)
def test_a_policy_that_cannot_be_pickled_supplies_weights_to_policies_of_a_factory(
    kind: Any,
) -> None:
    class OtherOrder(Level):
        def __init__(self) -> None:
            super().__init__()
            del self.level
            self.more = torch.nn.Parameter(torch.zeros(3))
            self.level = torch.nn.Parameter(torch.zeros(()))

    policy = acting(OneThread())
    policy.module.more = torch.nn.Parameter(torch.ones(3))
    torch.nn.init.constant_(policy.module.level, 0.5)
    with kind(
        [CountingEnv] * 2,
        policy,
        policy_factory=lambda: acting(OtherOrder()),
        frames_per_batch=10,
        max_staleness=None,
    ) as collector:
        assert collector.policy is policy
        for _ in range(2):
            assert (collector.next()["prey", "action"] == 0.5).all()
        with torch.no_grad():
            policy.module.level.fill_(0.25)
        collector.update_policy_weights_()
        collect_from_all(collector, 2)
        assert (collector.next()["prey", "action"] == 0.25).all()


@pytest.mark.parametrize("kind", WORKERS)
def test_weights_that_do_not_fit_the_policies_of_a_factory_are_refused(
    kind: Any,
) -> None:
    class Wide(Level):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Parameter(torch.zeros(3))

    with pytest.raises(
        ValueError, match=r"'module.more' is torch.float32 \[3\] in policy and missing"
    ):
        kind(
            CountingEnv,
            acting(Wide()),
            policy_factory=lambda: acting(Level()),
            num_workers=1,
            frames_per_batch=10,
        )
    factories = [level_policy, level_policy, lambda: acting(Wide())]
    with pytest.raises(ValueError, match="Worker 2 acts with the same network"):
        kind([CountingEnv] * 3, policy_factory=factories, frames_per_batch=10)


def test_a_policy_with_its_own_deepcopy_causes_no_warning() -> None:
    class Shared(OneThread):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
            return self

    with Collector(CountingEnv, acting(Shared()), frames_per_batch=10) as collector:
        collector.next()


FACTORIES = [CountingEnv] * 4


@pytest.mark.parametrize(
    ("kind", "options", "outline"),
    [
        (Collector, {}, "4 environments, [4, 10]"),
        (MultiSyncCollector, {"num_workers": 2}, "2 workers x 2 environments, [4, 10]"),
        (
            MultiAsyncCollector,
            {"num_workers": 2},
            "2 workers x 2 environments, [2, 20]",
        ),
        (MultiSyncCollector, {}, "4 workers x 1 environment, [4, 10]"),
    ],
)
def test_the_repr_has_size_version_and_frames(
    kind: Any, options: dict[str, Any], outline: str
) -> None:
    with kind(FACTORIES, frames_per_batch=40, seed=0, **options) as collector:
        name = kind.__name__
        assert repr(collector) == f"{name}({outline}, version 0, 0 frames)"
        for _ in range(30):
            collector.next()
        collector.load_state_dict(collector.state_dict() | {"policy_version": 12})
        after = f"{name}({outline}, version 12, 1,200 frames"
        if kind is not Collector:
            pool_of(collector).close(1.0)  # It does not contact workers.
        assert repr(collector) == f"{after})"
    assert repr(collector) == f"{after}, closed)"


@every_kind
def test_a_collector_that_was_not_started_has_a_repr(kind: Any) -> None:
    assert repr(kind.__new__(kind)) == f"{kind.__name__}(not started)"


def test_workers_of_different_sizes_are_summed() -> None:
    assert sized_workers([1, 3]) == "2 workers, 4 environments"


def collector(kind: Any = Collector, **options: Any) -> Any:
    return kind([CountingEnv] * 2, **{"frames_per_batch": 10, **options})


def test_a_collector_tells_its_size_and_whether_it_is_complete() -> None:
    with collector(total_frames=20) as limited:
        assert limited.total_frames == 20
        assert limited.requested_frames_per_batch == 10
        for expected in (False, True):
            limited.next()
            stats = limited.stats()
            assert stats["total_frames"] == 20
            assert stats["requested_frames_per_batch"] == 10
            assert stats["completed"] is expected
            stats["cut_trajectories"].append(7)  # A copy of the collector's own.
            assert limited.stats()["cut_trajectories"] == []
    with collector() as endless:
        assert endless.total_frames == -1
        assert "completed" not in endless.stats()


def test_torchrls_older_names() -> None:
    assert SyncDataCollector is Collector
    assert MultiSyncDataCollector is MultiSyncCollector
    assert MultiaSyncDataCollector is MultiAsyncCollector


def test_set_seed_and_shutdown_take_torchrls_arguments() -> None:
    first = collector()
    assert first.set_seed(3, True) == 3
    with pytest.raises(ValueError, match="close_env=False is not possible"):
        first.shutdown(close_env=False)
    first.shutdown(None, close_env=True)


@every_kind
def test_a_method_without_a_place_here_names_the_way(kind: Any) -> None:
    with collector(kind) as running:
        for name, advice in [
            ("map_fn", "getattr_env"),
            ("get_policy_version", "use policy_version"),
        ]:
            message = rf"{kind.__name__} has no {name}: .*{advice}"
            with pytest.raises(AttributeError, match=message):
                getattr(running, name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track_policy_version": True, "max_frames_per_traj": 3},
        {"cat_results": "stack", "envs_per_worker": 2, "frames_per_batch": 40},
        {"cat_results": 0},
        {"cat_results": 0, "frames_per_batch": [4, 10]},
        {"cat_results": -1, "envs_per_worker": 2, "frames_per_batch": 40},
    ],
    ids=str,
)
def test_a_fake_batch_has_the_keys_shapes_and_dtypes_of_a_batch(
    options: dict[str, Any],
) -> None:
    kind = MultiSyncCollector if "cat_results" in options else Collector
    with collector(kind, **options) as running:
        fake, batch = running.fake_tensordict(), running.next()
    assert fake.shape == batch.shape
    assert fake.names == batch.names == [*[None] * (batch.ndim - 1), "time"]
    keys = set(batch.keys(True, True))
    assert set(fake.keys(True, True)) == keys
    for key in keys:
        assert fake[key].dtype == batch[key].dtype
        assert fake[key].shape == batch[key].shape
        assert not fake[key].any()


def test_an_asynchronous_collector_has_no_fake_batch() -> None:
    with (
        collector(MultiAsyncCollector) as running,
        pytest.raises(NotImplementedError, match="next"),
    ):
        running.fake_tensordict()


def test_an_error_within_a_property_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collector() as running, monkeypatch.context() as patch:
        patch.delattr(running, "_source")
        with pytest.raises(AttributeError, match="no attribute '_source'"):
            _ = running.description
