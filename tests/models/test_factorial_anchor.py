"""Each combination of centralised and share_params reaches exactly its best reward.

Two agents act once. Task S rewards agent i for the action i, regardless of its
observation: only agents with separate weights can act differently. Task C shows agent i
a random bit and rewards it for the other agent's bit: only agents that see both
observations can know it. The best mean reward of each combination is known. If inputs,
outputs, agents or groups are wired wrongly, the reward is lower or higher.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import set_interaction_type

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import make_policy

# All four pairs of bits, with equal probability.
BITS = torch.tensor(list(itertools.product([0.0, 1.0], repeat=2)))
PAIR = EnvDescription(
    "pair",
    {
        "pair": GroupDescription(
            ("first", "second"),
            spaces.Box(0, 1, (1,), np.float32),
            spaces.Discrete(2),
        )
    },
)
OBSERVATION = {"S": torch.ones(4, 2, 1), "C": BITS.unsqueeze(-1)}
TARGET = {"S": torch.tensor([0, 1]).expand(4, 2), "C": BITS.flip(-1).long()}
BEST = {
    # (centralised, share_params): task S, task C
    (False, True): {"S": 0.5, "C": 0.5},
    (False, False): {"S": 1.0, "C": 0.5},
    (True, True): {"S": 0.5, "C": 0.75},
    (True, False): {"S": 1.0, "C": 1.0},
}


def frames(task: str, rows: Any) -> Any:
    group = TensorDict({"observation": OBSERVATION[task][rows]}, [len(rows), 2])
    return TensorDict({"pair": group}, [len(rows)])


def expected_return(policy: Any, task: str) -> Any:
    """Mean reward per agent over all pairs of bits, for the trained probabilities."""
    with torch.no_grad():
        probs = policy.get_dist(frames(task, torch.arange(4))).probs
    return probs.gather(-1, TARGET[task].unsqueeze(-1)).mean().item()


@pytest.mark.parametrize("task", ["S", "C"])
@pytest.mark.parametrize(("centralised", "share_params"), BEST)
def test_each_combination_reaches_exactly_its_best_reward(
    centralised: bool, share_params: bool, task: str
) -> None:
    torch.manual_seed(0)
    policy = make_policy(
        PAIR, centralised=centralised, share_params=share_params, num_cells=(16,)
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)

    for _ in range(100):
        rows = torch.randint(4, (256,))
        with torch.no_grad(), set_interaction_type("random"):
            td = policy(frames(task, rows))
        action = td["pair", "action"]
        reward = (action == TARGET[task][rows]).float().mean(-1, keepdim=True)
        advantage = reward - reward.mean()
        log_prob = policy.get_dist(td).log_prob(action)
        optimizer.zero_grad()
        (-log_prob * advantage).mean().backward()
        optimizer.step()

    best = BEST[centralised, share_params][task]
    assert expected_return(policy, task) == pytest.approx(best, abs=0.02)
