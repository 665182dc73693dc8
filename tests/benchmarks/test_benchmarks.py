"""Systems and rows are measured in turn, and what is reported of them."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import micro
import numpy as np
import pytest
import reproduce
import suite
import torch
from cases import datasets, families
from cases.case import Case
from experiments.experiment import Experiment
from experiments.headline import OURS, OURS_PARALLEL
from experiments.plan import plan
from experiments.settings import Settings
from harness import contest as contesting
from harness import processes, windows
from harness.budget import BESIDE, LONGEST, SHORTEST, Budget, Cost
from harness.contest import contest
from harness.estimates import Estimate, beside_the_others
from harness.results import Results, load
from harness.served import Served, System
from harness.turns import Alternative, measure
from harness.windows import Answer, Window, together
from limits.drawing import draw_actions
from limits.loops import OurLoop
from limits.stored import StoringLoop
from ours.batches import measure_batches
from peers import install
from peers.installed import installed, pythons
from reporting.reading import Reading
from reporting.readme import between_marks, readme_table
from reporting.targets import TARGETS, judge
from reproduce import Cell, agrees, cell_of, mean_interval, page
from support.processes import SOON, wait_until
from support.scripts import run_python, start_python
from tensordict import TensorDict
from workloads.adapters import our_factory
from workloads.counting import CountingEnv, CountingError, Fault
from workloads.table import WORKLOADS

from marl_collect.core.description import allocate
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import Run

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PYTHONS = {"pufferlib": Path("python")}
EVERYTHING = Settings(minutes=90, pythons=PYTHONS)


def window(value: float) -> dict[str, Any]:
    """Return a window in which every measurement is `value`."""
    return {
        "frames": 1000,
        "seconds": 1.0,
        "cpu_seconds": value,
        "own_cpu": 0.1,
        "episodes": 3,
        "rate": value,
        "rate_between": value,
    }


def made_up(values: dict[str, float], settings: Settings = EVERYTHING) -> Any:
    """Return results of the whole plan, with `values` by label, or 1."""
    experiments = {}
    for experiment in plan(settings):
        labels = {**experiment.systems, **dict.fromkeys(experiment.candidates)}
        grids = {
            label: {
                "rates": dict.fromkeys(candidates, 1.0),
                "errors": {},
                "best": next(iter(candidates)),
            }
            for label, candidates in experiment.candidates.items()
        }
        systems = {}
        for label in labels:
            system = experiment.systems.get(label)
            if system is None:
                system = next(iter(experiment.candidates[label].values()))
            value = values.get(label, 1.0)
            systems[label] = {
                "system": system.plain(),
                "windows": [window(value), window(value * 1.01)],
                "ready_seconds": 2.0,
                "memory_mb": 100.0,
                "error": "",
            }
        experiments[experiment.name] = {
            "title": experiment.title,
            "status": "ok",
            "reason": "",
            "window": 5.0,
            "rounds": 2,
            "grids": grids,
            "systems": systems,
            "notes": dict(experiment.notes),
            "control": [1.0, 1.01],
            "disturbed": False,
        }
    run = {
        "machine": {
            "cpu": "a <fast> CPU",
            "cores": 2,
            "date": "2026-01-01T00:00:00",
            "versions": {"torchrl": "0.14.1", "torch": "2.13.0"},
        },
        "minutes": 90.0,
        "only": [],
        "resumed": False,
        "wall_seconds": 60.0,
        "workers": 2,
        "peers": {
            "pufferlib": {"status": "failed", "reason": "no disk", "versions": {}}
        },
    }
    return {"format": 1, "runs": [run], "experiments": experiments}


RUNNERS = {
    "fake_steady": """
        def build(system):
            found = {"rate": 5.0, "frames": 10, "own": 1.0}
            return lambda seconds: found | {"seconds": seconds}
        """,
    "fake_restful": """
        def build(system):
            return lambda seconds: {"rate": 2.0, "own": 3.0}
        """,
    "fake_unfit": """
        def build(system):
            return lambda seconds: {"rate": 1.0, "own": None}
        """,
    "fake_hanging": """
        import subprocess, sys, threading
        def build(system):
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            subprocess.Popen(sleep, stdin=subprocess.DEVNULL, start_new_session=True)
            asked = []
            def measure(seconds):
                asked.append(seconds)
                if len(asked) > 2:
                    threading.Event().wait()
                return {"rate": 1.0}
            return measure
        """,
    "fake_ending": """
        def build(system):
            raise RuntimeError("no such thing here")
        """,
}


@pytest.fixture(autouse=True)
def fake_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in RUNNERS.items():
        lines = [line.removeprefix(" " * 8) for line in text.splitlines()]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{old}")


@pytest.mark.processes
def test_systems_that_hang_or_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    window, calls = Served._window, Counter[str]()

    def shortened(served: Served, seconds: float, timeout: float) -> Answer:
        """Do not wait a minute for the answer that never comes."""
        assert timeout >= contesting.SLACK_SECONDS
        runner = served.system.runner
        calls[runner] += 1
        hangs = runner == "fake_hanging" and calls[runner] == 3
        return window(served, seconds, 0.2 if hangs else timeout)

    monkeypatch.setattr(Served, "_window", shortened)
    names = ("fake_hanging", "fake_steady", "fake_ending")
    systems = {name: System(name) for name in names}
    messages: list[str] = []
    entries = contest(systems, 3, 0.1, messages.append)
    assert [w["rate"] for w in entries["fake_steady"]["windows"]] == [5.0] * 3
    assert entries["fake_steady"]["error"] == ""
    assert len(entries["fake_hanging"]["windows"]) == 1
    assert "no answer in 0 s" in entries["fake_hanging"]["error"]
    assert entries["fake_ending"]["windows"] == []
    assert "no such thing here" in entries["fake_ending"]["error"]
    assert len(messages) == 2


@pytest.mark.processes
def test_processes_of_a_system_end_with_it() -> None:
    served = Served(System("fake_hanging"))
    try:
        served.wait_until_ready(60)
        # A process that has just been started shows its variables a moment later.
        wait_until(lambda: len(processes.find(served.mark)) == 2)
    finally:
        served.close(0.0)
    wait_until(lambda: processes.find(served.mark) == [])


@pytest.mark.processes
def test_ours_and_two_copies_of_a_loop_are_measured_in_turn() -> None:
    systems = {
        "ours": System("ours.collectors", "free", options={"frames_per_batch": 100}),
        "stock": System("limits.stock", "free", copies=2),
    }
    entries = contest(systems, 2, 0.1, print)
    for entry in entries.values():
        assert entry["error"] == ""
        assert len(entry["windows"]) == 2
        assert all(w["rate"] > 0 and w["frames"] > 0 for w in entry["windows"])
        assert entry["memory_mb"] > 1


def environment_of_benchmarks() -> dict[str, str]:
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


MEASURE = """
import importlib, json, sys
from harness.served import System

system = System(**json.loads(sys.argv[1]))
measure = importlib.import_module(system.runner).build(system)
print(json.dumps([measure(0.1), measure(0.1)]))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "system",
    [
        System("limits.direct", "free", "mlp"),
        System("limits.stored", "free", "mlp", options={"frames": 50}),
        System("ours.collectors", "free", options={"environments": 4}),
        System("limits.lockstep", "free", options={"environments": 4}),
    ],
    ids=lambda system: system.runner,
)
def test_a_runner_is_measured(system: System) -> None:
    command = ["-c", MEASURE, json.dumps(system.plain())]
    process = run_python(*command, env=environment_of_benchmarks(), check=True)
    answers = json.loads(process.stdout.splitlines()[-1])
    assert len(answers) == 2
    assert all(a["rate"] > 0 and a["frames"] > 0 for a in answers)


MEETING = """
import mmap
from limits.posting import Posting

counts = memoryview(mmap.mmap(-1, 24)).cast("q")

def build(process):
    def step():
        counts[process] += 1
    return step

for spin in (0.0, 1e-3):
    posting = Posting(3, build, spin=spin)
    before = list(counts)
    for step in range(1, 51):
        posting.step()
        assert list(counts) == [count + step for count in before]
"""


@pytest.mark.processes
def test_processes_in_lockstep_all_take_every_step() -> None:
    run_python("-c", MEETING, env=environment_of_benchmarks(), check=True)


def test_a_storing_loop_keeps_the_data_of_a_collector() -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    env = our_factory("simple_spread")()
    observed = env.description.observed()
    loop = OurLoop(env, draw_actions("simple_spread"))
    storing = StoringLoop(loop, observed, 3)
    before, after, remainders = [], [], []
    loop.reset(0)
    for number in range(3):
        before.append({key: loop.row[key].copy() for key in observed})
        storing.step(number)
        after.append({key: loop.row[key].copy() for key in observed})
        rest = {k: a.copy() for k, a in loop.row.items() if k not in observed}
        remainders.append(rest)
    stored_bytes = [memory.tobytes() for memory in storing.stored]
    for frames in (before, after, remainders):
        for key in frames[0]:
            values = [frame[key].tobytes() for frame in frames]
            assert any(_in_order(values, bytes_) for bytes_ in stored_bytes), key
    sizes = sum(2 * loop.row[key].nbytes for key in observed)
    sizes += sum(array.nbytes for array in remainders[0].values())
    assert sizes * 3 <= sum(map(len, stored_bytes)) <= sizes * 3 + 3 * 512  # Gaps.
    storing.read()
    storing.step(3)
    assert [memory.tobytes() for memory in storing.stored] != stored_bytes


def _in_order(values: list[bytes], within: bytes) -> bool:
    position = 0
    for value in values:
        position = within.find(value, position)
        if position < 0:
            return False
        position += len(value)
    return True


def test_rates_with_and_between_resets_are_reported() -> None:
    window = Window()
    window.add(100, 1.0, 0, reset=False)
    window.add(100, 3.0, 2, reset=True)
    answer = window.answer()
    assert answer["rate"] == 50
    assert answer["rate_between"] == 100
    combined = together([answer, answer])
    assert combined["rate"] == 100
    assert combined["episodes"] == 4
    assert combined["seconds"] == 4


@pytest.mark.parametrize(("ahead", "share"), [(0, 3 / 4), (1, 2 / 4)])
def test_batches_begun_during_a_reset_do_not_count_as_between_resets(
    ahead: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(end_value: float) -> Any:
        done = torch.zeros(2, 5, 1, dtype=torch.bool)
        done[0, 2] = end_value
        return TensorDict({"next": {"done": done}}, (2, 5))

    batches = itertools.cycle([batch(1), batch(0), batch(0), batch(0)])
    milliseconds = itertools.count()
    clock = SimpleNamespace(
        perf_counter=lambda: next(milliseconds) / 1000, process_time=lambda: 0.0
    )
    monkeypatch.setattr(windows, "time", clock)
    answer = measure_batches(batches, ahead)(0.1)
    assert answer["frames"] == 100 * 10
    expected = share * answer["frames"]
    assert answer["frames_between"] == pytest.approx(expected, abs=20)


def test_an_estimate_is_the_median_of_paired_ratios() -> None:
    ours, other_values = [2.0, 4.0, 30.0], [1.0, 2.0, 10.0]
    estimate = Estimate.of_ratios(ours, other_values)
    assert estimate.median == 2.0
    assert estimate.low <= 2.0 <= estimate.high <= 3.0
    assert estimate == Estimate.of_ratios(ours, other_values)


def test_windows_are_as_long_as_the_time_allows() -> None:
    ahead = [Cost(30, 10), Cost(0, 5, least=4.0)]
    assert Budget(60).window(ahead) == LONGEST
    assert Budget(0.5).window(ahead) == SHORTEST
    middle = Budget(1.3).window(ahead)
    assert SHORTEST < middle < 4.0
    windows = 10 * (middle + BESIDE) + 5 * (4.0 + BESIDE)
    assert 30 + windows == pytest.approx(78, abs=2)


@pytest.mark.processes
def test_an_interrupted_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Experiment("a/good", "good", {"x": System("fake_steady")}, 1, 1.0)
    bad = Experiment("b/bad", "bad", {}, 1, 1.0, candidates={"x": {}}, notes={})
    monkeypatch.setattr(suite, "plan", lambda _: [bad, good])
    original = Experiment.run

    def run(self: Experiment, window: Any, say: Any) -> Any:
        if self.name == "b/bad":
            raise RuntimeError("broken")
        return original(self, window, say)

    monkeypatch.setattr(Experiment, "run", run)
    path = tmp_path / "result.json"
    suite.run(Settings(minutes=60), Results(path, resume=False))
    output = " ".join(capsys.readouterr().err.split())
    assert "1 of 2, 0.1 of 0.2 min left, windows of 5.0 s: bad" in output
    assert "2 of 2, 0.1 of 0.1 min left, windows of 5.0 s: good" in output
    experiments = load(path)["experiments"]
    assert experiments["b/bad"]["status"] == "failed"
    assert "broken" in experiments["b/bad"]["reason"]
    assert experiments["a/good"]["status"] == "ok"
    measured = []

    def note(self: Experiment, *_: Any) -> dict[str, Any]:
        measured.append(self.name)
        return {}

    monkeypatch.setattr(Experiment, "run", note)
    suite.run(Settings(minutes=60), Results(path, resume=True))
    assert measured == ["b/bad"]
    suite.run(Settings(minutes=-1), Results(path, resume=False))
    assert {e["status"] for e in load(path)["experiments"].values()} == {"not run"}


def test_the_fastest_is_chosen_by_ratios_within_a_round() -> None:
    # The second has the higher median, but is slower in two of three rounds.
    relative = beside_the_others({"a": [10, 1, 5], "b": [9, 0.9, 5.5], "c": [None] * 3})
    assert relative["a"] > 1.0 > relative["b"]
    assert "c" not in relative
    assert beside_the_others({"a": [0, 2], "b": [0, 6]}) == {"a": 0.25, "b": 0.75}


@pytest.mark.processes
def test_the_fastest_of_a_grid_by_the_requested_rate_is_measured() -> None:
    names = ("ending", "steady", "restful", "unfit")
    grid = {name: System(f"fake_{name}") for name in names}
    labels = {"x": grid, "y": grid}
    experiment = Experiment("a", "a", {}, 1, candidates=labels, fastest_by={"y": "own"})
    result = experiment.run(0.1, print)
    grids = result["grids"]
    assert "no such thing" in grids["x"]["errors"]["ending"]
    assert (grids["x"]["best"], grids["x"]["by"]) == ("steady", "rate")
    assert (grids["y"]["best"], grids["y"]["by"]) == ("restful", "own")
    assert grids["y"]["rates"]["unfit"] is None
    assert result["systems"]["x"]["system"]["runner"] == "fake_steady"


def test_unsupported_options_of_a_runner_are_errors() -> None:
    with pytest.raises(ValueError, match="5 environments cannot be shared by 2"):
        System("", options={"environments": 5}).shares(2)
    with pytest.raises(ValueError, match="multiwalker takes no keywords"):
        our_factory("multiwalker", {"spins": 3})


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"format": 0}')
    with pytest.raises(ValueError, match="format 0.*format 1"):
        load(path)


def test_results_contain_no_local_paths(tmp_path: Path) -> None:
    results = Results(tmp_path / "result.json", resume=False)
    path = Path(__file__).resolve()
    results.note("reason", f"File {path}, {sys.prefix}/lib, {tmp_path}/x")
    text = results.path.read_text()
    assert "File <checkout>/tests/benchmarks/" in text
    assert "<environment>/lib" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "name", [n for n, w in WORKLOADS.items() if w.family == "pettingzoo"]
)
def test_workloads_have_the_groups_and_sizes_of_the_table(name: str) -> None:
    pytest.importorskip("Box2D", reason="needs the extra pettingzoo")
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    env = our_factory(name)()
    groups = env.description.groups
    expected = WORKLOADS[name].groups
    assert set(groups) == set(expected)
    for group, workload_group in expected.items():
        assert len(groups[group].agents) == workload_group.agents
        assert groups[group].observation.shape == (workload_group.inputs,)
        action = groups[group].action
        assert (
            action.n if workload_group.discrete else action.shape[0]
        ) == workload_group.actions
    env.close()


def test_a_fault_occurs_once_after_the_calls_that_succeed() -> None:
    env = CountingEnv(fault=Fault("raise", "reset", at=1))
    env.bind(allocate(env.description.row()))
    env.reset_row(0)
    with pytest.raises(CountingError):
        env.reset_row(1)
    env.reset_row(2)


class Clock:
    """Time that passes only in calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float, work: float) -> float:
        self.now += seconds
        return work


def test_alternatives_are_measured_in_alternating_order() -> None:
    clock = Clock()
    order: list[str] = []

    def alternative(name: str, seconds: float) -> Alternative:
        def call() -> float:
            order.append(name)
            return clock.spend(seconds, 4)

        return Alternative(call)

    calls = {"a": alternative("a", 1.0), "b": alternative("b", 2.0)}
    times = measure(calls, 3, seconds=0.5, clock=clock)
    assert times == {"a": [0.25] * 3, "b": [0.5] * 3}
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"


def test_short_calls_fill_the_window_with_few_looks_at_the_clock() -> None:
    looks, calls = 0, 0
    clock = Clock()

    def looked_at() -> float:
        nonlocal looks
        looks += 1
        return clock()

    def call() -> float:
        nonlocal calls
        calls += 1
        return clock.spend(1e-5, 1)

    (values,) = measure({"a": Alternative(call)}, 1, clock=looked_at).values()
    assert values == pytest.approx([1e-5])
    assert calls >= 0.1 / 1e-5
    assert looks < calls / 20


def test_a_row_has_units_sizes_and_ratios() -> None:
    def build(_: ExitStack) -> dict[str, Alternative]:
        alternative = Alternative(lambda: 2e6, nbytes=lambda: 3e6)
        return {"first": alternative, "second": Alternative(lambda: 1e6)}

    case = Case("a row", build, "byte", clock=time.perf_counter)
    assert case.show([1e-6, 0.5e-6]) == "1.50 MB/s"
    assert Case("", build, "frame", "ms").show([0.002]) == "2.00 ms per frame"
    first, second = micro.rows(case, 2, 0.0)
    assert first.startswith("| a row | first | ")
    assert first.endswith("MB/s | 3.00 |  |")
    assert second.endswith(") |")

    def missing(_: ExitStack) -> dict[str, Alternative]:
        raise ImportError("no such library")

    (line,) = micro.rows(Case("a row", missing), 2, 0.0)
    assert line.startswith("| a row | not installed: no such library")


@pytest.mark.parametrize("name", micro.TABLE)
def test_rows_of_a_benchmark_have_different_names(name: str) -> None:
    names = [case.name for case in micro.find_cases(name)]
    assert names
    assert len(set(names)) == len(names)


ROWS = {
    "policy_step: TanhNormal, shared; envs: 1": "fused; called",
    "policy_step: rollout": "the environment alone; Collector, random actions",
    "models: fused, local, shared; 3 agents; batch 1": "ours; TorchRL; modules",
    "models: training, centralised, separate; 3 agents; batch 32": (
        "ours; TorchRL; modules"
    ),
    "worlds: 16 worlds, random; 1 %": "bare loop; Collector",
    "worlds: 16 worlds, network": "bare loop; Collector",
    "worlds: 64 worlds, trajectories; 1 %": (
        "plain batches; trajs_per_batch=64, cat; trajs_per_batch=64, padded"
    ),
    "prefetch: 64 worlds, 100": "waiting; prefetch=True",
    "groups: simple_spread_v3, 64": (
        "all processors, groups=1; all but one, groups=1; "
        "all processors, groups=2; all but one, groups=2"
    ),
    "assignment: simple_spread": (
        "one shared network; share_params=False; one group per agent; policies="
    ),
}
"""Alternatives of a row, by its benchmark and the words that find it."""


@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS)
def test_measures_a_row(row: str) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    name, _, words = row.partition(": ")
    case = micro.find_cases(name, words.split("; "))[0]
    alternatives = [line.split(" | ")[1] for line in micro.rows(case, 1, 0.0)]
    assert "; ".join(alternatives) == ROWS[row]


@pytest.mark.parametrize("library", ["lbforaging", "rware"])
def test_lists_are_compared(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library, reason=f"needs the extra {library}")
    monkeypatch.setattr(families, "FRAMES", 20)
    word = "Foraging-5x5" if library == "lbforaging" else "rware-tiny"
    case = micro.find_cases("families", [word])[0]
    stock, ours = micro.rows(case, 1, 0.0)
    assert "stock loop that stores | " in stock
    assert "Collector | " in ours


ENDED = """
import signal, sys, micro
from cases import datasets

def find_cases(name, words):
    print(datasets.folder(), flush=True)
    signal.pause()

micro.find_cases = find_cases
sys.argv = ["micro.py", "datasets"]
micro.main()
"""


@pytest.mark.processes
def test_a_benchmark_that_timeout_ends_leaves_no_folder() -> None:
    path = os.pathsep.join([str(Path(micro.__file__).parent), *sys.path])
    with start_python("-c", ENDED, env=os.environ | {"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON)
    assert process.returncode == 128 + signal.SIGTERM
    assert not folder.exists()


@pytest.mark.processes
def test_datasets_are_compared_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    sizes = {
        "TASKS": {"simple_spread_v3": (400,)},
        "COLLECTED": 400,
        "BATCH": 200,
        "SMALL_BATCHES": 3,
        "SAMPLE": 16,
        "LARGER_THAN_MEMORY": 800,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(datasets, name, value)
    for case in micro.find_cases("datasets"):
        lines = micro.rows(case, 1, 0.0)
        # The limit of memory needs root and a control group.
        assert "GiB" in case.name or len(lines) == 2, case.name
        assert not any("nan" in line for line in lines), case.name


@pytest.mark.processes
def test_simulators_on_a_device_are_measured_beside_bare_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vmas")
    import gpu_worlds

    command = ["gpu_worlds.py", "--device", "cpu", "--worlds", "3", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--only", "vmas/balance"])
    gpu_worlds.main()
    *_, header, _, row = capsys.readouterr().out.splitlines()
    cells = dict(zip(header.split("|"), row.split("|"), strict=True))
    rates = [cells[f" {side} "].split()[0] for side in gpu_worlds.SIDES[:3]]
    assert min(int(rate.replace(",", "")) for rate in rates) > 0


COMMITTED = BENCHMARKS / "results" / "committed.json"


LIMITS = {
    "direct loops against PufferLib": 6,
    "direct loops that meet at every step against PufferLib": 6,
    "ParallelEnv against loops that meet": 6,
    "CPU seconds of direct loops": 6,
    "direct loops against TorchRL": 4,
    "storing direct loops against direct": 5,
    "storing direct loops against stock": 5,
}
"""Ratios printed below the targets, and the number of lines of each."""


def test_every_target_is_measured_by_the_suite() -> None:
    verdicts = judge(Reading(made_up({})))
    assert [(v.target.title, v.reason) for v in verdicts if v.figure is None] == []
    assert len({v.target.title for v in verdicts}) == len(TARGETS)


def test_verdicts_use_the_median() -> None:
    fast = {v.target.title: v for v in judge(Reading(made_up({OURS: 50.0})))}
    slow = {v.target.title: v for v in judge(Reading(made_up({})))}
    title = "MultiSync against TorchRL's best: free, MLP"
    assert fast[title].word == "pass"
    assert fast[title].certain
    assert slow[title].word == "fail"
    best = "PufferLib's best, 0 us steps, workers: 1"
    cost = f"CPU seconds per frame of ParallelEnv, of {best}"
    dear = {v.target.title: v for v in judge(Reading(made_up({OURS_PARALLEL: 50.0})))}
    assert (dear[cost].word, slow[cost].word) == ("fail", "pass")


def test_a_target_that_was_not_measured_is_not_passed() -> None:
    results = made_up({OURS: 1000.0})
    failed = {"status": "failed", "reason": "a\nb"}
    results["experiments"]["headline/free/mlp"] |= failed
    entry = results["experiments"]["headline/multiwalker/random"]["systems"][OURS]
    entry |= {"windows": [], "error": "killed"}
    verdicts = {v.target.title: v for v in judge(Reading(results))}
    free = verdicts["MultiSync against TorchRL's best: free, MLP"]
    assert (free.word, free.passed) == ("not measured", False)
    assert free.reason == "headline/free/mlp failed: b"
    stock = verdicts["MultiSync, random, against stock loops: multiwalker"]
    assert stock.reason == "killed"


@pytest.mark.processes
def test_the_commands_print_targets_and_table(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(made_up({OURS: 2.0})))
    process = run_python(BENCHMARKS / "check_targets.py", path)
    assert process.returncode == 1
    assert f"of {len(TARGETS)} targets are passed" in process.stdout
    assert "fail" in process.stdout
    beside = [line for line in process.stdout.splitlines() if "no target" in line]
    storing = [line for line in beside if "loops that store" in line]
    assert len(storing) == 6
    assert all("2.00 (2.00 to 2.00)" in line for line in storing if "large" not in line)
    for phrase, count in LIMITS.items():
        limits = [line for line in beside if phrase in line]
        assert len(limits) == count
        assert all("1.00 (1.00 to 1.00)" in line for line in limits)
    document = tmp_path / "README.md"
    document.write_text("a\n<!-- benchmarks/report.py -->\nold\n<!-- end -->\nb\n")
    command = [BENCHMARKS / "report.py", path]
    chart = tmp_path / "chart.png"
    run_python(*command, "--readme", document, "--chart", chart, check=True)
    assert "| multiwalker_v9, mlp | 1.00 |" in between_marks(document.read_text())
    assert document.read_text().endswith("<!-- end -->\nb\n")
    assert chart.read_bytes().startswith(b"\x89PNG")
    nothing = run_python(*command)
    assert nothing.returncode == 2
    assert "pass --readme, --chart or both" in nothing.stderr


def test_systems_that_prefetch_are_paused_while_others_are_measured() -> None:
    for experiment in plan(EVERYTHING):
        grids = [list(grid.values()) for grid in experiment.candidates.values()]
        for system in [*experiment.systems.values(), *itertools.chain(*grids)]:
            if system.options.get("prefetch"):
                assert system.pause


def test_the_readme_has_the_table_of_the_committed_run() -> None:
    expected = readme_table(load(COMMITTED)) if COMMITTED.exists() else ""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert between_marks(readme) == expected


@pytest.mark.processes
def test_a_peer_that_cannot_be_installed_is_recorded_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "STEPS", ())
    monkeypatch.setattr(install, "CHECK", "import no_such_module_here")
    for minutes, reason in (
        ("0", "no end before the deadline"),
        ("5", "No module named 'no_such_module_here'"),
    ):
        arguments = ["install.py", "--at", str(tmp_path), "--minutes", minutes]
        monkeypatch.setattr(sys, "argv", arguments)
        install.main()
        assert reason in installed(tmp_path)["pufferlib"]["reason"]
        assert pythons(tmp_path) == {}


CELL = Cell(
    task="matrix/climbing",
    setup="qmix-local-shared-ids",
    frames=100,
    cpu_seconds=9.0,
    returns=[[0.0, 4.0, 1.0], [2.0, 6.0, 9.0]],
)


def a_run(seed: int, returns: list[float], **changes: object) -> Run:
    records = [
        EvaluationRecord(frames, 2, [2 * value], [25])
        for frames, value in enumerate(returns)
    ]
    last = records[-1]
    setup = "qmix-local-shared-ids"
    run = Run("matrix/climbing", setup, seed, {}, records, last, last, {}, {})
    return replace(run, **{"cpu_seconds": 3.0, **changes})  # type: ignore[arg-type]


def test_maximum_is_of_one_evaluation_and_average_over_all() -> None:
    # The means over seeds are 1, 5 and 5; of equal ones, the wider interval.
    assert CELL.maximum == mean_interval([1.0, 9.0])
    lucky = replace(CELL, returns=[[99.0, 4.0, 1.0], [99.0, 6.0, 9.0]])
    assert lucky.maximum == CELL.maximum, "untrained weights are never best"
    assert CELL.average[0] == pytest.approx((5 / 3 + 17 / 3) / 2)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_interval_covers_the_mean_in_95_of_100_draws(seeds: int) -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, seeds))
    intervals = [mean_interval(draw) for draw in draws.tolist()]
    covered = sum(abs(mean - 3.0) <= half for mean, half in intervals)
    assert abs(covered / len(draws) - 0.95) < 0.02


def test_a_reference_agrees_within_the_interval_or_one_percent() -> None:
    assert agrees((10.0, 2.0), 12.0)
    assert not agrees((10.0, 2.0), 12.1)
    assert agrees((125.0, 0.0), 126.0)
    assert not agrees((125.0, 0.0), 127.0)
    assert agrees((-100.0, 0.0), -100.5)
    assert not agrees((math.nan, 0.0), 1.0)


def test_a_cell_has_the_returns_of_an_agent_in_matrix_games() -> None:
    runs = [a_run(0, [1.0, 2.0]), a_run(1, [3.0, 5.0], cpu_seconds=7.0)]
    assert cell_of(runs) == Cell(
        "matrix/climbing", "qmix-local-shared-ids", 1, 5.0, [[1.0, 2.0], [3.0, 5.0]]
    )
    foraging = [replace(run, task="lbforaging/10x10-3p-3f") for run in runs]
    assert cell_of(foraging).returns == [[2.0, 4.0], [6.0, 10.0]]
    for other in (a_run(2, [1.0, 2.0], best=None), a_run(2, [1.0])):
        with pytest.raises(ValueError, match="must be finished, with equal frames"):
            cell_of([*runs, other])
    with pytest.raises(ValueError, match="train this cell anew"):
        cell_of([*runs, a_run(2, [1.0, 2.0], cpu_seconds=None)])


def test_the_page_names_what_agrees_and_what_is_missing() -> None:
    same = replace(CELL, returns=[[125.0] * 2] * 2)
    text = page([same])
    assert "| 125.00 ± 0.00 | 125.00 ± 0.00 | 100 | 9 | - | 125.00: agrees |" in text
    assert "125.00: differs" in page([replace(same, returns=[[275.0] * 2] * 2)])
    assert "- `matrix/climbing`: iql, vdn, ippo, mappo, ia2c, maa2c\n" in text
    assert text.count("\n- `") == len({task for task, _ in reproduce.CELLS})


def test_cells_that_are_not_finished_are_trained_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, commands = {"matrix-climbing-ia2c": 3}, []

    def train(command: list[str], **_: Any) -> Any:
        folder = Path(command[command.index("--out") + 1])
        commands.append((folder.name, command[5:]))
        return SimpleNamespace(returncode=codes.get(folder.name, 0))

    begun = tmp_path / "matrix-climbing-qmix" / "config.json"
    begun.parent.mkdir()
    begun.touch()
    complete = {"matrix-climbing-vdn": reproduce.SEEDS, "matrix-climbing-qmix": 1}
    committed = tmp_path / "committed"
    committed.mkdir()
    (committed / "matrix-climbing-mappo.json").touch()
    monkeypatch.setattr(reproduce, "COMMITTED", committed)
    monkeypatch.setattr(reproduce, "RUNS", tmp_path)
    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(
        reproduce, "finished", lambda folder: [None] * complete.get(folder.name, 0)
    )
    assert reproduce.run_cells("climbing", jobs=2) == 3
    names = [name for name, _ in commands]
    algorithms = ("iql", "qmix", "ippo", "ia2c")
    assert names == [f"matrix-climbing-{name}" for name in algorithms]
    resumed = ["--resume" in command for _, command in commands]
    assert resumed == [False, True, False, False]
    frames = [command[command.index("--frames") + 1] for _, command in commands]
    assert frames == ["250000", "250000", "500000", "500000"]
    commands.clear()
    assert reproduce.run_cells("8x8-2p-2f-coop", jobs=1) == 0
    assert len(commands) == 3
    assert not any("--frames" in command for _, command in commands)


def test_the_page_has_the_frames_of_runs_on_matrix_games() -> None:
    text = page([])
    for task, algorithm in reproduce.CELLS:
        if task.startswith("matrix/"):
            frames = f"{reproduce.MATRIX_FRAMES[algorithm]:,} frames"
            assert algorithm in text.partition(frames)[2].partition(")")[0]


def test_the_committed_page_is_of_the_committed_cells() -> None:
    assert reproduce.PAGE.read_text() == page(reproduce.committed())
