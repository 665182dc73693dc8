"""Every option, alone and in typical combinations."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collector_tools import release_when_preempted, slow_until_preempted
from tensordict import TensorDict
from tests_policies import level_policy
from workloads.counting import CountingEnv, Fault

from marl_collect.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from marl_collect.errors import WorkerError
from marl_collect.parallel_env import SerialEnv
from marl_collect.weights.shared import SharedMemoryWeights

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


def never_built() -> CountingEnv:
    """Fail, as a factory of arguments that are refused before anything starts."""
    pytest.fail("an environment was built")


def slow(seconds: float = 0.15) -> Any:
    return lambda: CountingEnv(
        fault=Fault("sleep", "step", repeat=True, seconds=seconds)
    )


def join(collector: Any) -> TensorDict:
    return torch.cat([batch.clone() for batch in collector], dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_show_every_keyword(kind: Any) -> None:
    names = list(inspect.signature(kind).parameters)
    assert names[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    assert "max_worker_rss" in names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compact_obs": "yes"}, TypeError, "True or False, but is 'yes'"),
        ({"split_trajs": "no"}, TypeError, "True or False, but is 'no'"),
        ({"compile_policy": 3}, TypeError, "True or False or a mapping"),
        ({"preload": "os"}, TypeError, "sequence of strings, but is 'os'.*in a list"),
        ({"exploration_type": 3}, TypeError, "one of InteractionType.MODE"),
        ({"exploration_type": "often"}, TypeError, "one of InteractionType.MODE"),
        ({"start_timeout": float("inf")}, TypeError, "a positive number of seconds"),
        ({"start_timeout": 1e300}, ValueError, "a positive number of seconds"),
        ({"timeout": "a"}, TypeError, "a positive number of seconds"),
        ({"frames_per_batch": 10**18}, ValueError, "at most 4_294_967_296.*memory"),
        ({"frames_per_batch": True}, TypeError, "an integer of at least 1"),
        ({"num_sub_threads": 10**6}, ValueError, "at most 4_096"),
        ({"num_workers": 10**6}, ValueError, "at most 10_000"),
        ({"create_env_kwargs": 3}, TypeError, "a mapping .* a sequence of mappings"),
        ({"create_env_kwargs": [3]}, TypeError, "a mapping .* a sequence of mappings"),
        ({"policy_factory": 3}, TypeError, "callable, a sequence of callables or None"),
        ({"seed": True}, TypeError, "an integer of at least 0"),
        ({"seed": -1}, ValueError, "an integer of at least 0"),
        ({"postproc": 3}, TypeError, "callable or None"),
        ({"start_method": "fork"}, ValueError, "'fork' is not supported"),
        ({"device": True}, TypeError, "device must be"),
        ({"total_frame": 3}, TypeError, "Did you mean total_frames"),
        ({"extend_buffer": False}, TypeError, "always gets whole batches"),
        ({"return_same_td": True}, TypeError, "batches are already views"),
        (
            {"reset_at_each_iter": True, "trajs_per_batch": 2},
            ValueError,
            "complete ones only: omit reset_at_each_iter",
        ),
        ({"env_device": "cuda"}, TypeError, "environments run on the CPU"),
        ({"collector_class": int}, TypeError, "takes no collector_class"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    kind: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    def never() -> None:
        pytest.fail("an environment was built")

    with pytest.raises(error, match=words):
        kind(never, **({"frames_per_batch": 8} | options))


def test_only_an_async_collector_limits_staleness() -> None:
    with pytest.raises(TypeError, match="no max_staleness: .* use MultiAsyncCollector"):
        MultiSyncCollector([never_built], frames_per_batch=10, max_staleness=0)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"timeout": 10.0}, "worker processes, .* use MultiSyncCollector"),
        ({"start_timeout": 10.0}, "worker processes, .* use MultiSyncCollector"),
        ({"start_method": "spawn"}, "worker processes, .* use MultiSyncCollector"),
        ({"preload": ["json"]}, "worker processes, .* use MultiSyncCollector"),
        ({"num_sub_threads": 2}, "worker processes, .* use num_threads"),
        ({"on_worker_failure": "restart"}, "worker processes, .* use MultiSync"),
        (
            {"weight_sync_schemes": {"policy": SharedMemoryWeights()}},
            "acts with the trained module itself: omit it",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_collector_without_workers_refuses_their_options(
    option: dict[str, Any], words: str
) -> None:
    (name,) = option
    with pytest.raises(TypeError, match=f"Collector takes no {name}: .*{words}"):
        Collector(never_built, frames_per_batch=8, **option)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_collector_with_workers_numbers_environments_itself(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=r"takes no worker_idx: .* use rank and world_size"
    ):
        kind(never_built, num_workers=1, frames_per_batch=8, worker_idx=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"split_trajs": True}])
def test_a_format_of_trajectories_needs_batches_of_trajectories(
    kind: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="traj_format='cat' .* set trajs_per_batch"):
        kind(never_built, frames_per_batch=8, traj_format="cat", **options)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_modules_are_preloaded_by_a_fork_server_only(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"preload is \['json'\], .* no fork server"):
        kind(
            never_built,
            num_workers=1,
            frames_per_batch=8,
            start_method="spawn",
            preload=["json"],
        )


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("option", ["device", "policy_device"])
def test_a_list_of_devices_fits_the_workers(kind: Any, option: str) -> None:
    with pytest.raises(ValueError, match="has 3 entries, .* each of 2 workers"):
        kind(
            never_built,
            num_workers=2,
            frames_per_batch=8,
            **{option: ["cpu"] * 3},
        )


@pytest.mark.parametrize("how", ["stack", 0, -1])
def test_joined_batches_need_equal_workers(how: Any) -> None:
    def of(environments: int) -> Any:
        return lambda: SerialEnv(environments, CountingEnv)

    with pytest.raises(ValueError, match=r"the workers have \[1, 2\]"):
        MultiSyncCollector([of(1), of(2)], frames_per_batch=12, cat_results=how)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_of_numpy_are_accepted(kind: Any) -> None:
    options = {"num_workers": 1, "envs_per_worker": 2, "frames_per_batch": 8} | {
        "total_frames": 16,
        "max_frames_per_traj": 3,
        "init_random_frames": 8,
        "num_sub_threads": 1,
        "seed": 5,
    }
    numpy = {name: np.int64(number) for name, number in options.items()}
    expected = [batch.clone() for batch in kind(CountingEnv, **options)]
    actual = [batch.clone() for batch in kind(CountingEnv, **numpy)]
    assert len(actual) == 2
    assert all((a == b).all() for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_torchrls_values_for_off_are_accepted(kind: Any) -> None:
    off = {
        "total_frames": -1,
        "init_random_frames": -1,
        "traj_format": None,
        "cudagraph_policy": None,
        "compile_policy": None,
        "split_trajs": None,
        "trust_policy": None,
        "use_buffers": None,
        "extend_buffer": True,
        "return_same_td": False,
        "env_device": "cpu",
        "collector_class": Collector,
    }
    plain = {"num_workers": 1, "frames_per_batch": 8, "seed": 0}
    for limit in (0, -1):
        with (
            kind(CountingEnv, **plain, **off, max_frames_per_traj=limit) as collector,
            kind(CountingEnv, **plain) as other,
        ):
            actual, expected = collector.next(), other.next()
            assert "step_count" not in actual.keys()
            assert (actual == expected).all()
            with pytest.raises(TypeError, match="no length"):
                len(collector)


@pytest.mark.torchrl_defect("D3b")
def test_preempted_frames_are_marked(tmp_path: Path) -> None:
    with MultiSyncCollector(
        [CountingEnv, CountingEnv, slow_until_preempted(tmp_path)],
        frames_per_batch=30,
        preemptive_threshold=0.5,
        set_truncated=True,
        seed=0,
    ) as collector:
        release_when_preempted(collector, 2, tmp_path)
        for _ in range(3):
            batch = collector.next().clone()
            mask = batch["collector", "mask"]
            assert torch.equal(mask, batch["collector", "traj_ids"] != -1)
            ends = mask.sum(1)
            assert ends[:2].max() == 10
            assert 1 <= ends[2] < 10
            assert (batch["hunter", "observation"][~mask] == 0).all()
            for row, end in zip(batch, ends.tolist(), strict=True):
                assert row["next", "done"][end - 1].all()
        assert collector.stats()["frames"] < 90


def test_full_threshold_waits_for_all() -> None:
    with MultiSyncCollector(
        [CountingEnv, slow(0.02)], frames_per_batch=20, preemptive_threshold=1.0
    ) as collector:
        batch = collector.next()
        assert ("collector", "mask") not in batch.keys(True)
        assert collector.stats()["frames"] == 20


def test_frames_per_worker() -> None:
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=[4, 10]) as collector:
        batch = collector.next()
        assert batch.shape == (2, 10)
        assert batch["collector", "mask"].sum(1).tolist() == [4, 10]
        assert collector.stats()["frames"] == 14
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[4, 10], cat_results=0
    ) as collector:
        assert collector.next().shape == (14,)
    with pytest.raises(ValueError, match="3 entries"):
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=[1, 2, 3])


def test_worker_idx_separates_the_numbers_of_environments() -> None:
    first = Collector([CountingEnv] * 2, frames_per_batch=8, seed=0)
    other = Collector([CountingEnv] * 2, frames_per_batch=8, seed=0, worker_idx=1)
    together = Collector([CountingEnv] * 4, frames_per_batch=16, seed=0)
    expected = together.next()
    assert (first.next() == expected[:2]).all()
    assert (other.next() == expected[2:]).all()


def test_devices() -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=8, storing_device="cpu", policy_device="cpu"
    ) as collector:
        assert collector.next().device in (None, torch.device("cpu"))
    with pytest.raises(ValueError, match="storing_device is 'meta'"):
        Collector(CountingEnv, frames_per_batch=8, storing_device="meta")
    with pytest.raises(ValueError, match="policy_device must be a device"):
        Collector(CountingEnv, frames_per_batch=8, policy_device="gpu")
    with pytest.raises(ValueError, match="worker 2"):
        MultiSyncCollector(
            [CountingEnv] * 3, frames_per_batch=9, policy_device=["cpu", "cpu"]
        )


def test_init_fn_runs_first_in_every_worker(tmp_path: Any) -> None:
    def note() -> None:
        import os

        (tmp_path / str(os.getpid())).touch()

    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=8, init_fn=note
    ) as collector:
        assert {p.name for p in tmp_path.iterdir()} == set(
            map(str, collector.worker_pids)
        )


def test_kwargs_reach_the_factories() -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=8, create_env_kwargs={"n_prey": 5}
    ) as collector:
        assert collector.next()["prey"].shape == (2, 4, 5)
        assert collector.getattr_env("batch_size") == [[()], [()]]
        with pytest.raises(AttributeError, match="misspelt"):
            collector.getattr_env("misspelt")
        assert collector.next() is not None


def test_a_worker_that_fails_again_before_its_first_batch_is_an_error() -> None:
    collector = MultiSyncCollector(
        [CountingEnv, lambda: CountingEnv(fault=Fault("kill", "step", 5))],
        frames_per_batch=20,
        on_worker_failure="restart",
    )
    with pytest.raises(WorkerError, match="SIGKILL") as excinfo:
        collector.next()
    assert "was restarted and failed" in " ".join(excinfo.value.__notes__)


def test_compact_observations_refuse_options_that_change_the_order_of_frames() -> None:
    with pytest.raises(ValueError, match="compact_obs"):
        Collector(CountingEnv, frames_per_batch=8, compact_obs=True, split_trajs=True)


def test_arguments_that_need_a_gpu_raise_an_error_without_one() -> None:
    with pytest.raises(ValueError, match="policy_device"):
        MultiSyncCollector(CountingEnv, frames_per_batch=8, cudagraph_policy=True)


def test_a_compiled_policy_gives_the_same_actions() -> None:
    policy = level_policy()
    torch.nn.init.constant_(policy.module.level, 3.0)
    with MultiSyncCollector(
        CountingEnv, policy, frames_per_batch=8, compile_policy={"backend": "eager"}
    ) as collector:
        assert (collector.next()["prey", "action"] == 3.0).all()


def test_torchrls_weight_schemes_are_refused_with_advice() -> None:
    torchrl = pytest.importorskip("torchrl.weight_update")
    with pytest.raises(TypeError, match="TorchRL's schemes have no use: omit"):
        MultiSyncCollector(
            CountingEnv,
            frames_per_batch=8,
            weight_sync_schemes={"policy": torchrl.MultiProcessWeightSyncScheme()},
        )


@pytest.mark.parametrize("extends", [0, 1])
def test_a_replay_buffer_of_two_dimensions_gets_whole_batches(extends: int) -> None:
    torchrl_data = pytest.importorskip("torchrl.data")
    storage = torchrl_data.LazyTensorStorage(64, ndim=2)
    buffer = torchrl_data.ReplayBuffer(storage=storage, dim_extend=extends)
    with Collector(
        [CountingEnv] * 2, frames_per_batch=8, total_frames=16, replay_buffer=buffer
    ) as collector:
        for _ in collector:
            pass
    buffered = buffer[:]
    assert buffered.shape == ((4, 4) if extends == 0 else (2, 8))
    with pytest.raises(ValueError, match="has ndim=2"):
        Collector(
            CountingEnv, frames_per_batch=8, replay_buffer=buffer, split_trajs=True
        )


def test_a_compiled_policy_is_advised_to_omit_the_compilation() -> None:
    with Collector(
        CountingEnv,
        level_policy(),
        frames_per_batch=8,
        compile_policy={"backend": "eager"},
    ) as collector:
        assert "omit compile_policy" in collector.explain()[0]


def test_the_name_of_a_policy_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"None for random actions, or load_policy"):
        Collector(CountingEnv, "random", frames_per_batch=8)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("returned", [None, 3])
def test_a_buffer_needs_the_batch_of_postproc(dims: int, returned: Any) -> None:
    torchrl_data = pytest.importorskip("torchrl.data")
    storage = torchrl_data.LazyTensorStorage(8, ndim=dims)
    with (
        Collector(
            CountingEnv,
            frames_per_batch=8,
            postproc=lambda _: returned,
            replay_buffer=torchrl_data.ReplayBuffer(storage=storage),
        ) as collector,
        pytest.raises(TypeError, match=f"postproc .* returned {returned}"),
    ):
        collector.next()
