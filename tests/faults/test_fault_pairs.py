"""A few pairs of faults; ``fault_pairs.py`` draws as many as you like."""

import random
import subprocess
import sys
from typing import Any

import fault_pairs
import pytest
from fault_pairs import SUBJECTS, check, draw, prepare
from support.clocks import Clock
from workloads.counting import CountingEnv

from marl_collect.distributed import RayCollector

pytest_plugins = ["support.ray_cluster"]

SLACK = 60.0
"""Seconds for a busy machine; the command is stricter."""

SEEDS = {
    "Collector": [14],
    "MultiSync": [51, 82],
    "MultiAsync": [36, 98],
    "ParallelEnv": [11, 40],
    "Evaluator": [5, 33],
    "Writer": [20],
    "Ray": [74, 116],
}

FULL_DISKS = {
    38: "exit in step of 0, then none in full disk",
    323: "full disk of 1, then stop in same close",
}


@pytest.fixture(scope="module", autouse=True)
def _servers() -> None:
    prepare()


def check_pairs(subject: str, clock: Clock | None = None) -> None:
    for seed in SEEDS[subject]:
        pair = draw(random.Random(seed))
        assert pair.subject == subject
        check(pair, SLACK, clock)


@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name != "Ray"])
def test_the_first_of_two_faults_is_reported(
    subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_pairs(subject, Clock(monkeypatch))


@pytest.mark.usefixtures("cluster")
def test_the_first_of_two_faults_is_reported_on_ray() -> None:
    # Ray opens files when it is used first, and keeps them.
    RayCollector(CountingEnv, frames_per_batch=1).shutdown()
    check_pairs("Ray")


@pytest.mark.mounts
@pytest.mark.parametrize("seed", FULL_DISKS)
def test_a_full_disk_hides_no_fault_and_is_hidden_by_none(seed: int) -> None:
    arguments = ["--seed", f"{seed}", "--pairs", "1", "--slack", f"{SLACK}"]
    command = [sys.executable, fault_pairs.__file__, *arguments]
    process: Any = subprocess.run(
        ["unshare", "-Urm", *command], capture_output=True, text=True, check=False
    )
    assert f"{seed} Writer: {FULL_DISKS[seed]}: " in process.stdout, (
        process.stdout + process.stderr
    )
    assert "1 pairs, 0 failed" in process.stdout
