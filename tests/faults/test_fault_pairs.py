"""Every fault of every subject, and pairs that are drawn.

With ``MARL_COLLECT_TIMES=20`` in the environment there are 20 times as many pairs.
"""

import os
from pathlib import Path

import pytest
from fault_pairs import FIRST, ONLY, Pair, check, draw, prepare
from fault_tools import be_patient
from support.clocks import Clock
from support.scripts import run_mounted
from workloads.counting import CountingEnv

from marl_collect.distributed import RayCollector

pytest_plugins = ["support.ray_cluster"]

SLACK = 60.0
"""Seconds for a busy machine."""

STACK = ("hang", "stop", "abort", "segfault")
"""Faults after which the worker prints its stack."""

TIMES = int(os.environ.get("MARL_COLLECT_TIMES", "1"))
PAIRS = [draw(seed) for seed in range(21 * TIMES)]

ON_RAY = [
    Pair("Ray", "raise in reset"),
    Pair("Ray", "hang in step"),
    Pair("Ray", "fork and kill", "raise", "other step"),
    Pair("Ray", "lost actor", "raise", "other close", 0),
]

FULL_DISKS = """
import sys
sys.path.insert(0, sys.argv[1])
from fault_pairs import *

MultiSyncCollector(CountingEnv, frames_per_batch=1).shutdown()  # See ``prepare``.
for pair in (
    Pair("Writer", "exit in step", "none", "full disk", 0),
    Pair("Writer", "full disk", "stop", "same close"),
):
    check(pair, float(sys.argv[2]))
"""


@pytest.fixture(scope="module", autouse=True)
def _servers() -> None:
    prepare()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.mark.torchrl_defect("D8")
@pytest.mark.parametrize("first", [name for name in FIRST if name not in ONLY])
@pytest.mark.parametrize("subject", ["MultiSync", "MultiAsync", "groups"])
def test_a_fault_is_reported_with_its_worker_place_and_cause(
    subject: str,
    first: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    check(Pair(subject, first), SLACK, Clock(monkeypatch))
    where_it_was = "strike" in capfd.readouterr().err
    assert where_it_was == first.startswith(STACK), "the Python stack belongs on stderr"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_first_of_two_faults_is_reported(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(pair, SLACK, Clock(monkeypatch))


@pytest.mark.usefixtures("cluster")
def test_the_first_of_two_faults_is_reported_on_ray() -> None:
    # Ray opens files when it is used first, and keeps them.
    RayCollector(CountingEnv, frames_per_batch=1).shutdown()
    for pair in ON_RAY:
        check(pair, SLACK)


@pytest.mark.mounts
def test_a_full_disk_hides_no_fault_and_is_hidden_by_none(tmp_path: Path) -> None:
    """In a process that may mount a small disk."""
    (tmp_path / "disk").mkdir()
    arguments = str(Path(__file__).parent), str(SLACK)
    process = run_mounted("disk", FULL_DISKS, *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
