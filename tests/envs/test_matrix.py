"""Matrix games have the payoffs of the papers, whatever was played before."""

from itertools import product

import pytest
import torch

pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")

from zoo_tools import BoundEnv

from marl_collect import check_env
from marl_collect.envs import MatrixGameEnv
from marl_collect.envs.matrix.provider import FAMILY

CLIMBING = "11 -30 0 -30 7 0 0 6 5"
PENALTY = "k 0 10 0 2 0 10 0 k"
TABLES = {"climbing": CLIMBING} | {
    f"penalty-{size}": PENALTY.replace("k", str(-size)) for size in (0, 25, 50, 75, 100)
}
"""Claus and Boutilier 1998, row by row."""


@pytest.mark.parametrize("task", FAMILY.listed())
def test_the_payoffs_are_those_of_the_papers(task: str) -> None:
    env = BoundEnv(MatrixGameEnv(task))
    paid = []
    for pair in product(range(3), repeat=2):
        env.step(agent=pair)
        first, second = env["agent", "reward"].ravel().tolist()
        assert first == second
        paid.append(first)
    assert paid == list(map(float, TABLES[task].split()))


def test_an_episode_is_truncated_after_its_rounds() -> None:
    for keywords, length in [({}, 25), ({"rounds": 9}, 9), ({"time_limit": 7}, 7)]:
        with MatrixGameEnv("climbing", **keywords) as env:
            data = env.rollout(30)
            assert env.description.time_limit == length
        assert len(data) == length
        assert data["next", "truncated"].flatten().tolist()[-1]
        assert not data["next", "terminated"].any()
        assert torch.equal(data["agent", "observation"], torch.zeros(length, 2, 2))


def test_check_env() -> None:
    check_env(lambda: MatrixGameEnv("penalty-25", agent_ids=True), episodes=2, steps=60)


def test_other_names_and_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="no matrix game 'penalty-1', only climbing"):
        MatrixGameEnv("penalty-1")
    with pytest.raises(ValueError, match="rounds must be at least 1, but is 0"):
        MatrixGameEnv("climbing", rounds=0)
    with pytest.raises(TypeError, match="climbing has no argument size, only rounds"):
        MatrixGameEnv("climbing", size=3)
