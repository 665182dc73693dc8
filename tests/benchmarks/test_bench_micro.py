"""Micro-benchmarks alternate, time only their calls, and can build their rows."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import micro
import pytest
from cases import datasets, families
from cases.case import Case
from harness.turns import Alternative, measure
from support.processes import SOON
from support.scripts import start_python


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "words", "alternatives"),
    [
        ("policy_step", ["TanhNormal, shared", "envs: 1"], ["fused", "called"]),
        (
            "policy_step",
            ["rollout"],
            ["the environment alone", "Collector, random actions"],
        ),
        (
            "models",
            ["fused, local, shared", "3 agents", "batch 1"],
            ["ours", "TorchRL", "modules"],
        ),
        (
            "models",
            ["training, centralised, separate", "3 agents", "batch 32"],
            ["ours", "TorchRL", "modules"],
        ),
        ("worlds", ["16 worlds, random", "1 %"], ["bare loop", "Collector"]),
        ("worlds", ["16 worlds, network"], ["bare loop", "Collector"]),
        ("prefetch", ["64 worlds, 100"], ["waiting", "prefetch=True"]),
        (
            "groups",
            ["simple_spread_v3, 64"],
            [
                "all processors, groups=1",
                "all but one, groups=1",
                "all processors, groups=2",
                "all but one, groups=2",
            ],
        ),
        (
            "worlds",
            ["64 worlds, trajectories", "1 %"],
            ["plain batches", "trajs_per_batch=64, cat", "trajs_per_batch=64, padded"],
        ),
        (
            "assignment",
            ["simple_spread"],
            [
                "one shared network",
                "share_params=False",
                "one group per agent",
                "policies=",
            ],
        ),
    ],
)
def test_measures_a_row(name: str, words: list[str], alternatives: list[str]) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    case = micro.find_cases(name, words)[0]
    lines = micro.rows(case, 1, 0.0)
    assert [line.split(" | ")[1] for line in lines] == alternatives


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
