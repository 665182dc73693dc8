"""A few pairs of faults; ``fault_pairs.py`` draws as many as you like."""

import random

import pytest
from fault_pairs import SUBJECTS, check, draw, prepare

SLACK = 60.0
"""Seconds for a busy machine; the command is stricter."""

SEEDS = {
    "Collector": [2],
    "MultiSync": [3, 8],
    "MultiAsync": [7, 13],
    "ParallelEnv": [0, 9],
    "Evaluator": [5, 10],
    "Writer": [19],
}


@pytest.fixture(scope="module", autouse=True)
def _servers() -> None:
    prepare()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_first_of_two_faults_is_reported(subject: str) -> None:
    for seed in SEEDS[subject]:
        pair = draw(random.Random(seed))
        assert pair.subject == subject
        check(pair, SLACK)
