"""Every option, alone and in typical combinations."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collector_tools import release_when_preempted, slow_until_preempted
from tests_policies import at_level
from workloads.counting import CountingEnv, Fault

from marl_collect.collectors import (
    Collector,
    CollectorOptions,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from marl_collect.errors import WorkerError
from marl_collect.options import parse
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.weights.shared import SharedMemoryWeights

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


def slow(seconds: float) -> Any:
    return lambda: CountingEnv(fault=Fault("sleep", repeat=True, seconds=seconds))


SINGLE, SYNC, ASYNC = KINDS
MASK = ("collector", "mask")
NO_WORKERS = r"Collector takes no {}: .*worker processes, .* use {}"
RANK: dict[str, Any] = {"rank": 0, "world_size": 2}
ENDING = RANK | {"total_frames": 20}
TWO: dict[str, Any] = {"trajs_per_batch": 2}
SPAWN: dict[str, Any] = {"start_method": "spawn"}
SCHEMES = {"weight_sync_schemes": {"policy": (SCHEME := SharedMemoryWeights())}}
CPUS, NAMES = ["cpu", "cpu:0"], r"\['cpu', 'cpu:0'\]"
REFUSED: list[tuple[list[Any], dict[str, Any], Any, str]] = [
    (KINDS, {"compact_obs": "yes"}, TypeError, "True or False, but is 'yes'"),
    (KINDS, {"split_trajs": "no"}, TypeError, "True or False, but is 'no'"),
    (KINDS, {"compile_policy": 3}, TypeError, "True or False or a mapping"),
    (KINDS, {"preload": "os"}, TypeError, "of strings, but is 'os'.*in a list"),
    (KINDS, {"exploration_type": 3}, TypeError, "one of InteractionType.MODE"),
    (KINDS, {"start_timeout": float("inf")}, TypeError, "a positive number of sec"),
    (KINDS, {"start_timeout": 1e300}, ValueError, "a positive number of seconds"),
    (KINDS, {"timeout": "a"}, TypeError, "a positive number of seconds"),
    (KINDS, {"timeout": 0}, ValueError, "timeout"),
    (KINDS, {"frames_per_batch": 10**18}, ValueError, "at most 4_294_967_296.*memory"),
    (KINDS, {"frames_per_batch": True}, TypeError, "an integer of at least 1"),
    (KINDS, {"frames_per_batch": 0}, ValueError, r"1, but is 0\. .*per_batch=2_000"),
    (KINDS, {"total_frames": 0}, ValueError, "total_frames"),
    (KINDS, {"max_frames_per_traj": -2}, ValueError, "max_frames_per_traj"),
    (KINDS, {"num_sub_threads": 10**6}, ValueError, "at most 4_096"),
    (KINDS, {"num_workers": 10**6}, ValueError, "at most 10_000"),
    (KINDS, {"create_env_kwargs": 3}, TypeError, "a mapping .* a sequence of mapp"),
    (KINDS, {"create_env_kwargs": [3]}, TypeError, "a mapping .* a sequence of mapp"),
    (KINDS, {"policy_factory": 3}, TypeError, "callable, a sequence of callables or"),
    (KINDS, {"seed": True}, TypeError, "an integer of at least 0"),
    (KINDS, {"seed": -1}, ValueError, "an integer of at least 0"),
    (KINDS, {"start_method": "fork"}, ValueError, "'fork' is not supported"),
    (KINDS, {"device": True}, TypeError, "device must be"),
    (KINDS, {"storing_device": "meta"}, ValueError, "storing_device is 'meta'"),
    (KINDS, {"policy_device": "gpu"}, ValueError, "policy_device must be a device"),
    (KINDS, {"cudagraph_policy": True}, ValueError, "policy_device"),
    (KINDS, {"total_frame": 3}, TypeError, "Did you mean total_frames"),
    (KINDS, {"policy": "random"}, TypeError, "None for random actions, or load_pol"),
    (KINDS, {"cat_results": 1}, (TypeError, ValueError), "cat_results"),
    (KINDS, {"cat_results": "cat"}, (TypeError, ValueError), "cat_results"),
    (KINDS, {"preemptive_threshold": 1.5}, (TypeError, ValueError), "preemptive_thre"),
    # Options of TorchRL that have one value here.
    (KINDS, {"extend_buffer": False}, TypeError, "always gets whole batches"),
    (KINDS, {"return_same_td": True}, TypeError, "batches are already views"),
    (KINDS, {"env_device": "cuda"}, TypeError, "environments run on the CPU"),
    (KINDS, {"collector_class": int}, TypeError, "takes no collector_class"),
    # Options that exclude each other.
    (KINDS, TWO | {"reset_at_each_iter": True}, ValueError, "complete ones only: omit"),
    (KINDS, TWO | {"set_truncated": True}, ValueError, "set_truncated"),
    (KINDS, TWO | {"traj_format": "nested"}, (TypeError, ValueError), "traj_format"),
    (KINDS, {"traj_format": "cat"}, ValueError, "'cat' .* set trajs_per_batch"),
    (KINDS, {"traj_format": "cat", "split_trajs": True}, ValueError, "set trajs_per_b"),
    (KINDS, {"compact_obs": True, "split_trajs": True}, ValueError, "compact_obs"),
    (KINDS, {"rank": 1}, ValueError, "pass both"),
    (KINDS, {"world_size": 2}, ValueError, "pass both"),
    (KINDS, {"rank": 2, "world_size": 2}, ValueError, "from 0 to world_size - 1"),
    ([SINGLE], RANK | {"worker_idx": 1}, ValueError, "without worker_idx"),
    ([SINGLE], {"world_size": 2, "worker_idx": 1}, ValueError, "without worker_idx"),
    (KINDS, ENDING | TWO, ValueError, "trajs_per_batch, the ranks .* numbers of batc"),
    ([SYNC], ENDING | {"preemptive_threshold": 0.5}, ValueError, "old, the ranks"),
    # Options of other collectors.
    ([SYNC], {"max_staleness": 0}, TypeError, "no max_stal.* use MultiAsyncCollector"),
    ([ASYNC], {"cat_results": 0}, TypeError, "use MultiSyncCollector"),
    ([ASYNC], {"prefetch": True}, TypeError, "use MultiSyncCollector"),
    ([ASYNC], {"preemptive_threshold": 0.5}, TypeError, "use MultiSyncCollector"),
    *(
        ([SINGLE], option, TypeError, NO_WORKERS.format(*option, instead))
        for option, instead in (
            ({"timeout": 10.0}, "MultiSyncCollector"),
            ({"start_timeout": 10.0}, "MultiSyncCollector"),
            (SPAWN, "MultiSyncCollector"),
            ({"preload": ["json"]}, "MultiSyncCollector"),
            ({"num_sub_threads": 2}, "num_threads"),
            ({"on_worker_failure": "restart"}, "MultiSyncCollector"),
            ({"max_worker_rss": 1}, "MultiSyncCollector"),
        )
    ),
    (KINDS[1:], {"weight_sync_schemes": {"value": SCHEME}}, ValueError, "'policy'"),
    ([SINGLE], SCHEMES, TypeError, "acts with the trained module itself: omit it"),
    *(
        (KINDS[1:], {"policy": policy, "weight_sync_schemes": {"policy": 3}}, *refusal)
        for refusal in [(TypeError, r"must be SharedMemoryWeights\(\)")]
        for policy in (None, lambda td: td)
    ),
    ([SINGLE], {"policy_device": CPUS}, ValueError, rf"one policy, .* names {NAMES}"),
    (
        *(KINDS, {"num_workers": 2, "device": CPUS, "policy_device": "cpu"}),
        *(ValueError, rf"device names {NAMES}: pass storing_device too"),
    ),
    ([SYNC, ASYNC], {"worker_idx": 1}, TypeError, "worker_idx: .* use rank and world"),
    ([SYNC, ASYNC], SPAWN | {"preload": ["json"]}, ValueError, "json.* no fork server"),
    # Lists that do not fit the workers.
    *(
        ([SYNC, ASYNC], {"num_workers": 3, name: values}, ValueError, words)
        for name, values, words in (
            ("device", ["cpu"] * 4, "has 4 entries, .* each of 3 workers"),
            ("policy_device", ["cpu"] * 2, "has 2 entries, .* each of 3 workers"),
            ("frames_per_batch", [1, 2], "2 entries"),
        )
    ),
]


@pytest.mark.torchrl_defect("D21")
@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [(kind, *case) for kinds, *case in REFUSED for kind in kinds],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    kind: Any, options: dict[str, Any], error: Any, words: str
) -> None:
    def never() -> None:
        pytest.fail("an environment was built")

    with pytest.raises(error, match=words):
        kind(never, **({"frames_per_batch": 8} | options))


@pytest.mark.parametrize("how", ["stack", 0, -1])
def test_joined_batches_need_equal_workers(how: Any) -> None:
    def of(environments: int) -> Any:
        return lambda: SerialEnv(environments, CountingEnv)

    with pytest.raises(ValueError, match=r"the workers have \[1, 2\]"):
        MultiSyncCollector([of(1), of(2)], frames_per_batch=12, cat_results=how)


def test_ranks_that_end_together_need_equal_batches() -> None:
    with pytest.raises(ValueError, match=r"several sizes, the ranks .* numbers of bat"):
        MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=[4, 8], **ENDING)


def test_torchrls_values_for_off_are_those_of_options_that_are_left_out() -> None:
    off: dict[str, Any] = {
        **dict.fromkeys(("total_frames", "init_random_frames"), -1),
        **dict.fromkeys(("traj_format", "cudagraph_policy", "compile_policy")),
        **dict.fromkeys(("split_trajs", "trust_policy", "use_buffers")),
        "extend_buffer": True,
        "return_same_td": False,
        "env_device": "cpu",
        "collector_class": Collector,
    }
    arguments: dict[str, Any] = {"create_env_fn": CountingEnv, "frames_per_batch": 8}
    plain = parse(CollectorOptions, "Collector", (), arguments)
    for limit in (0, -1):
        off |= arguments | {"max_frames_per_traj": limit}
        assert parse(CollectorOptions, "Collector", (), off) == plain


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


def test_a_worker_that_fails_again_before_its_first_batch_is_an_error() -> None:
    collector = MultiSyncCollector(
        [CountingEnv, lambda: CountingEnv(fault=Fault("kill", "step", 5))],
        frames_per_batch=20,
        on_worker_failure="restart",
    )
    with pytest.raises(WorkerError, match="SIGKILL") as excinfo:
        collector.next()
    assert "was restarted and failed" in " ".join(excinfo.value.__notes__)


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
    storage = partial(torchrl_data.LazyTensorStorage, 64, ndim=2)
    buffer = torchrl_data.ReplayBuffer(
        storage=storage, dim_extend=extends, delayed_init=bool(extends)
    )
    with Collector(
        [CountingEnv] * 2, frames_per_batch=8, total_frames=16, replay_buffer=buffer
    ) as collector:
        for _ in collector:
            pass
    buffered = buffer[:]
    assert buffered.shape == ((4, 4) if extends == 0 else (2, 8))
    storage = torchrl_data.LazyTensorStorage(64, ndim=3)
    larger = torchrl_data.ReplayBuffer(storage=storage)
    for dims, refused, shapes in ((2, buffer, True), (3, larger, False)):
        with pytest.raises(ValueError, match=f"has ndim={dims}"):
            Collector(
                CountingEnv,
                frames_per_batch=8,
                replay_buffer=refused,
                split_trajs=shapes,
            )


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("returned", [None, 3])
def test_a_buffer_needs_the_batch_of_postproc(dims: int, returned: Any) -> None:
    torchrl_data = pytest.importorskip("torchrl.data")
    storage = torchrl_data.LazyTensorStorage(8, ndim=dims)
    with Collector(
        CountingEnv,
        frames_per_batch=8,
        postproc=lambda batch: batch[:0] if empty else returned,
        replay_buffer=torchrl_data.ReplayBuffer(storage=storage),
    ) as collector:
        empty = True  # It may leave out all frames.
        assert collector.next() is None
        empty = False
        with pytest.raises(TypeError, match=f"postproc .* returned {returned}"):
            collector.next()


def preloading(**options: Any) -> Any:
    env: Any = CountingEnv(**options)
    env.preloaded = "tabnanny" in sys.modules
    return env


@pytest.mark.parametrize("kind", KINDS[1:])
def test_options_of_workers_reach_them(kind: Any, tmp_path: Path) -> None:
    def note() -> None:
        (tmp_path / str(os.getpid())).touch()

    with kind(
        [preloading] * 2,
        at_level(3.0)(),
        frames_per_batch=8,
        init_fn=note,
        preload=["tabnanny"],
        create_env_kwargs={"action_mask": True},
        policy_device="cpu",
        storing_device="cpu",
        compile_policy={"backend": "eager"},
    ) as collector:
        pids = {path.name for path in tmp_path.iterdir()}
        assert pids == set(map(str, collector.worker_pids))
        batch = collector.next()
        assert ("hunter", "action_mask") in batch.keys(include_nested=True)
        assert batch.device in (None, torch.device("cpu"))
        assert (batch["prey", "action"] == 3.0).all()
        assert "omit compile_policy" in collector.explain()[0]
        assert collector.getattr_env("preloaded") == [[True], [True]]


PAIR = partial(ParallelEnv, 2, slow(0.05), num_processes=1, groups=2)


@pytest.mark.torchrl_defect("D3")
@pytest.mark.parametrize(
    ("shape", "third"),
    [
        ({}, PAIR),
        ({"split_trajs": True}, PAIR),
        ({"trajs_per_batch": 2}, slow(0.05)),
        ({"cat_results": 0}, slow(0.05)),
    ],
    ids=["plain", "split", "whole", "joined"],
)
def test_preempted_and_resumed_frames_are_those_of_a_run_without_preemption(
    shape: dict[str, Any], third: Any
) -> None:
    """How many frames a slow worker collects is random; what follows them is not."""
    # A deterministic policy, because noise is also drawn for frames that are dropped.
    policy, envs = at_level(1.0)(), [CountingEnv, CountingEnv, third]
    with Collector([CountingEnv] * 4, policy, frames_per_batch=400, seed=4) as whole:
        expected = whole.next()
    build = partial(MultiSyncCollector, envs, policy, frames_per_batch=60, **shape)
    frames: dict[int, list[Any]] = {}

    def collect(collector: Any) -> None:
        for _ in range(2):
            batch = collector.next()
            mask = batch.get(MASK, torch.ones(batch.shape).bool())
            for frame in batch[mask].exclude(MASK).clone():
                index = int(frame["collector", "traj_ids"]) >> 32
                frames.setdefault(index, []).append(frame)

    # A share of less than one worker means one.
    with build(preemptive_threshold=0.3, seed=4) as first:
        collect(first)
        assert first.steps_so_far() == first.frames
        state = first.state_dict()
    with build(preemptive_threshold=0.5, seed=9) as second:
        second.load_state_dict(state)
        collect(second)
        counted = second.stats()["frames"]
        assert counted < 60 * second.stats()["batches"]
    for index, row in frames.items():
        assert (torch.stack(row) == expected[index, : len(row)]).all(), index
    delivered = sum(map(len, frames.values()))
    assert delivered <= counted if "trajs_per_batch" in shape else delivered == counted


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_batches_of_trajectories_do_not_wait_for_ever(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.buffers.trajectories.LONGEST", 100)
    endless = partial(CountingEnv, min_length=10**9, max_length=10**9, deaths=False)
    # Episodes of environment 1 end, but those of the other one never do.
    build = partial(kind, [endless, CountingEnv], frames_per_batch=40)
    with build(trajs_per_batch=2**40) as collector:
        for _ in range(2):  # The collector is closed by its error.
            with pytest.raises(RuntimeError, match="environment 0 .*max_frames_per_tr"):
                collector.next()
    with build(trajs_per_batch=90, max_frames_per_traj=150) as collector:
        assert collector.next().shape == (90, 150)
