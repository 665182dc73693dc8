"""Worker processes fill one batch together; their deaths and errors are reported."""

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.clocks import LIMIT, Clock, beside, hangs, waits
from support.internals import pool_of
from support.processes import suspend, wait_until
from support.scripts import run_python
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.errors import ClosedError, WorkerError, worker_error_of
from marl_collect.processes.status_board import PHASE, Phase


def fault(*args: Any, **kwargs: Any) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv(fault=Fault(*args, **kwargs))


class Constant(nn.Module):
    """Writes its weights as actions, without a matrix product, so they are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("bias", torch.zeros(3, 2), persistent=False)
        self.big = nn.Parameter(torch.zeros(50_000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = observation.shape[0]
        action = (self.level + self.bias).expand(batch, 3, 2)
        spread = torch.stack([self.big.min(), self.big.max()]).expand(batch, 2)
        return action, torch.zeros(batch, 2, dtype=torch.int64), spread


def constant() -> TensorDictModule:
    return TensorDictModule(
        Constant(),
        in_keys=[("prey", "observation")],
        out_keys=[("prey", "action"), ("hunter", "action"), "spread"],
    )


def exhaust(collector: MultiSyncCollector) -> None:
    for _ in collector:
        pass


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.torchrl_defect("D13")
def test_weights_reach_workers_only_with_an_update() -> None:
    policy = constant()
    with MultiSyncCollector(
        [CountingEnv] * 2, policy, frames_per_batch=8, track_policy_version=True
    ) as collector:
        assert collector.policy is policy

        def act() -> tuple[float, int]:
            batch = collector.next()
            assert batch is not None
            actions = batch["prey", "action"]
            assert (actions == actions.flatten()[0]).all()
            versions = batch["policy_version"]
            assert (versions == versions[0, 0]).all()
            return float(actions.flatten()[0]), int(versions[0, 0])

        assert act() == (0.0, 0)
        with torch.no_grad():
            policy.module.level.fill_(1.0)
            policy.module.bias.fill_(0.5)
        assert act() == (0.0, 0)
        collector.update_policy_weights_()
        assert collector.policy_version == 1
        assert act() == (1.5, 1)
        other = constant()
        with torch.no_grad():
            other.module.level.fill_(7.0)
        collector.update_policy_weights_(other)
        assert act() == (7.0, 2)
        collector.update_policy_weights_(TensorDict.from_module(policy))
        assert act() == (1.5, 3)
        with torch.no_grad():
            policy.module.level = nn.Parameter(torch.full((3, 2), 2.0))
        collector.update_policy_weights_(policy)
        assert act() == (2.5, 4)


def test_update_at_each_batch_publishes_by_itself() -> None:
    policy = constant()
    collector = MultiSyncCollector(
        [CountingEnv] * 2,
        policy,
        frames_per_batch=8,
        total_frames=32,
        update_at_each_batch=True,
    )
    for step, batch in enumerate(collector):
        assert (batch["prey", "action"] == step).all()
        with torch.no_grad():
            policy.module.level += 1


def test_training_without_updates_causes_a_warning() -> None:
    policy = constant()
    with MultiSyncCollector(CountingEnv, policy, frames_per_batch=8) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.level += 1
        collector.next()
        with pytest.warns(UserWarning, match=r"update_policy_weights_\(\)"):
            collector.next()


def test_missing_weights_are_named() -> None:
    with (
        MultiSyncCollector(CountingEnv, constant(), frames_per_batch=8) as collector,
        pytest.raises(KeyError, match="module.big"),
    ):
        collector.update_policy_weights_({"module.level": torch.zeros(3, 2)})


@pytest.mark.torchrl_defect("D13")
def test_weights_of_two_versions_are_never_mixed() -> None:
    policy = constant()
    with MultiSyncCollector([CountingEnv] * 2, policy, frames_per_batch=4) as collector:
        for version in range(1, 200):
            with torch.no_grad():
                policy.module.big.fill_(version)
            collector.update_policy_weights_()
            if version % 3 == 0:
                batch = collector.next()
                assert batch is not None
                assert (batch["spread"] == version).all()


def test_a_policy_on_meta_is_materialised_once_for_all_workers() -> None:
    with torch.device("meta"):
        policy = TensorDictSequential(
            TensorDictModule(
                nn.Linear(3, 2),
                in_keys=[("prey", "observation")],
                out_keys=[("prey", "action")],
            ),
            TensorDictModule(
                lambda x: torch.zeros(x.shape[:-1], dtype=torch.int64),
                in_keys=[("hunter", "observation")],
                out_keys=[("hunter", "action")],
            ),
        )
    with MultiSyncCollector(
        [CountingEnv] * 2, policy, frames_per_batch=40, seed=0
    ) as collector:
        batch = collector.next()
        assert batch is not None
        assert next(policy.parameters()).is_meta
        outputs = collector.policy(batch.select(("prey"), ("hunter")).clone())
        alive = batch["prey", "mask"]
        torch.testing.assert_close(
            outputs["prey", "action"][alive], batch["prey", "action"][alive]
        )


def test_with_a_factory_alone_all_workers_use_worker_zeros_weights() -> None:
    def build() -> TensorDictModule:
        policy = constant()
        nn.init.normal_(policy.module.level)
        return policy

    with MultiSyncCollector(
        [CountingEnv] * 3, policy_factory=build, frames_per_batch=9
    ) as collector:
        batch = collector.next()
        assert batch is not None
        actions = batch["prey", "action"]
        assert (actions == actions[0, 0]).all()
        assert actions.abs().sum() > 0
        with pytest.raises(RuntimeError, match="policy_factory"):
            collector.update_policy_weights_()
        fresh = constant()
        collector.update_policy_weights_(fresh)
        batch = collector.next()
        assert batch is not None
        assert (batch["prey", "action"] == 0).all()


def test_a_killed_worker_is_named_and_no_process_is_left() -> None:
    before = len(children())
    collector = MultiSyncCollector(
        [CountingEnv, fault("kill", "step", 5)], frames_per_batch=40
    )
    with pytest.raises(WorkerError, match=r"Worker 1 .*SIGKILL") as excinfo:
        collector.next()
    assert excinfo.value.phase == "step"
    assert not any(psutil.pid_exists(pid) for pid in collector.worker_pids)
    with pytest.raises(WorkerError, match="Worker 1"):
        collector.next()
    collector.shutdown()
    # The fork server keeps running for the next collector.
    assert len(children()) <= before + 1


@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_an_error_in_a_worker_is_raised_with_its_own_type(phase: str) -> None:
    with pytest.raises(CountingError, match=f"fault in {phase}") as excinfo:
        MultiSyncCollector(
            [CountingEnv, CountingEnv, fault("raise", phase)], frames_per_batch=30
        ).next()
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert (cause.worker, cause.environment, cause.phase) == (2, 2, phase)
    assert "CountingError" in cause.remote_traceback


def test_a_late_error_names_the_environment() -> None:
    late = fault("raise", "step", 25)
    collector = MultiSyncCollector([CountingEnv, late], frames_per_batch=20)
    collector.next()
    with pytest.raises(CountingError) as excinfo:
        exhaust(collector)
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert cause.environment == 1
    among = MultiSyncCollector(
        [CountingEnv, CountingEnv, CountingEnv, late],
        num_workers=2,
        frames_per_batch=40,
    )
    among.next()
    with pytest.raises(CountingError) as excinfo:
        exhaust(among)
    note = "environment 3, which is one of 2 in its process"  # As the user counts.
    assert note in " ".join(excinfo.value.__notes__)
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert cause.environment == 3


def test_a_hung_worker_is_reported_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hung, clock = tmp_path / "hung", Clock(monkeypatch)
    collector = MultiSyncCollector(
        [CountingEnv, fault(hangs(hung), "step", 3)], frames_per_batch=40, timeout=LIMIT
    )

    def is_the_only_one_at_work() -> bool:
        steps_done = collector.steps_so_far() == 20 + 4
        pool = pool_of(collector)
        line = pool.status_board.lines[0]
        return hung.exists() and steps_done and line.cells[PHASE] == Phase.IDLE

    clock.runs_when = is_the_only_one_at_work
    with pytest.raises(WorkerError, match=r"Worker 1 .*hung 100 s"):
        collector.next()
    assert not any(psutil.pid_exists(pid) for pid in collector.worker_pids)


def test_a_pause_of_the_trainer_is_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_file, finish = tmp_path / "begun", tmp_path / "finish"
    clock = Clock(monkeypatch)

    def pause() -> None:
        wait_until(started_file.exists)
        clock.pass_slowly(0.1 * LIMIT)
        clock.now += 36 * LIMIT
        clock.wait_for_search()
        finish.touch()

    with (
        MultiSyncCollector(
            fault(waits(started_file, finish), "step", 3),
            frames_per_batch=8,
            timeout=LIMIT,
        ) as collector,
        beside(pause),
    ):
        assert collector.next() is not None


def test_a_stopped_worker_continues() -> None:
    slow = fault("sleep", "step", 2, seconds=0.2)
    with MultiSyncCollector([slow], frames_per_batch=8, timeout=30) as collector:
        pid = collector.worker_pids[0]
        suspend(pid)
        resume = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pid}"])
        assert collector.next() is not None
        resume.wait()


def test_environments_of_workers_must_agree() -> None:
    with pytest.raises(ValueError, match=r"worker 1.*worker 0"):
        MultiSyncCollector(
            [CountingEnv, lambda: CountingEnv(n_prey=4)], frames_per_batch=8
        )


def test_a_closed_collector_raises_an_error() -> None:
    collector = MultiSyncCollector(CountingEnv, frames_per_batch=8)
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(ClosedError):
        collector.next()


def test_a_policy_that_cannot_be_pickled_is_refused_before_any_start() -> None:
    class Stubborn(nn.Module):
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    policy = TensorDictModule(
        Stubborn(), in_keys=[("prey", "observation")], out_keys=[("prey", "action")]
    )
    with pytest.raises(TypeError, match="policy_factory"):
        MultiSyncCollector(CountingEnv, policy, frames_per_batch=8)


def test_a_factory_that_cannot_be_pickled_is_refused_before_any_start() -> None:
    generator = (i for i in range(3))
    with pytest.raises(TypeError, match="worker 0"):
        MultiSyncCollector(lambda: next(generator), frames_per_batch=8)


def test_nothing_is_left_after_many_collectors() -> None:
    def once() -> None:
        with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=8) as collector:
            collector.next()

    once()
    process = psutil.Process()
    files, processes = process.num_fds(), len(children())
    for _ in range(5):
        once()
    assert process.num_fds() <= files + 2
    assert len(children()) <= processes


SCRIPT = """
    import torch
    from tensordict.nn import TensorDictModule
    from marl_collect import MultiSyncCollector
    from workloads.counting import CountingEnv

    print("the script runs")

    class Policy:
        def __call__(self, td):
            td["hunter", "action"] = torch.ones(td.shape[0], 2, dtype=torch.int64)
            td["prey", "action"] = torch.zeros(td.shape[0], 3, 2)
            return td

    class ScriptError(Exception):
        pass

    def make(index):
        def build():
            if index == 7:
                raise ScriptError("seven")
            return CountingEnv()
        return build

    left = MultiSyncCollector(
        [make(0)], Policy(), frames_per_batch=10, start_method={method!r}
    )
    assert (left.next()["hunter", "action"] == 1).all()
    try:
        MultiSyncCollector([make(7)], frames_per_batch=10, start_method={method!r})
    except ScriptError as error:
        print("caught", error)
    assert (left.next()["hunter", "action"] == 1).all()
    {end}
"""


@pytest.mark.timeout(320)  # Up to four processes import torch one after another.
@pytest.mark.parametrize(
    ("method", "end", "interpreter"),
    [
        ("forkserver", "", True),
        ("forkserver", "raise SystemError('mine')", False),
        ("spawn", "raise SystemError('mine')", False),
    ],
    ids=["forkserver-end", "forkserver-raise", "spawn-raise"],
)
def test_script_without_guard_runs_and_ends(
    tmp_path: Path, method: str, end: str, interpreter: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(method=method, end=end))
    process = run_python(script, interpreter=interpreter, timeout=300)
    assert process.stdout.splitlines() == ["the script runs", "caught seven"], (
        process.stderr
    )
    assert process.returncode == (1 if end else 0), process.stderr
    assert ("SystemError: mine" in process.stderr) == bool(end)


def test_explain_describes_how_the_policy_runs() -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, constant(), frames_per_batch=8
    ) as collector:
        lines = collector.explain()
    assert len(lines) == 2
    assert "Constant" in lines[0], "names the part that was not recognised"


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_explain_answers_after_the_loop(kind: Any) -> None:
    collector = kind(CountingEnv, constant(), frames_per_batch=8, total_frames=16)
    answers = [collector.explain() for _ in collector]
    assert len(answers) == 2
    assert collector.explain() == answers[-1]
    assert "Constant" in answers[-1][0]


@pytest.mark.torchrl_defect("D15")
def test_a_fixed_seed_of_environments_causes_a_warning() -> None:
    pytest.importorskip("mpe2")
    from marl_collect.envs import PettingZooEnv

    def make() -> PettingZooEnv:
        return PettingZooEnv("simple_spread_v3", seed=3)

    with pytest.warns(UserWarning, match="pins seed=3 for all 2"):
        MultiSyncCollector([make] * 2, frames_per_batch=8).shutdown()
