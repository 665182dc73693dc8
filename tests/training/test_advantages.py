"""Advantages in tasks whose values are known in closed form: turns, deaths, limits."""

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from marl_collect import EnvDescription, GroupDescription
from marl_collect.training.advantages import TRAINED, write_advantages
from marl_collect.training.options import TrainingOptions

GAMMA = 0.99
LENGTH = 20
FRAMES = 70
LAMBDAS = (0.0, 0.95, 1.0)
STEPS = torch.arange(FRAMES) % LENGTH
BOX = spaces.Box(0, 1, (1,))


def turns(waiting: float) -> tuple[Any, Any, Any]:
    """Two agents act in turn: 1 for acting, and ``waiting`` for waiting.

    Returns:
        Which agents act in each step, which have ended, and their rewards, ``[T, n]``.
    """
    steps = torch.arange(LENGTH + 1)
    acts = torch.stack([steps % 2 == 0, steps % 2 == 1], -1)
    return acts, torch.zeros_like(acts), torch.where(acts, 1.0, waiting)


def deaths() -> tuple[Any, Any, Any]:
    """Three agents get 1 per frame while they live; the last one dies after frame 3."""
    dead = torch.zeros(LENGTH + 1, 3, dtype=torch.bool)
    dead[4:, 2] = True
    return ~dead, dead, (~dead).float()


def geometric(first: float, n: int, ratio: float = GAMMA) -> float:
    """Return ``first * (1 + ratio + ... + ratio ** (n - 1))``."""
    return first * (1 - ratio**n) / (1 - ratio)


def value_in_turn(step: int, agent: int, *, team: bool, waiting: float) -> float:
    """Return the value of acting in ``step``."""
    assert agent == step % 2
    remaining = LENGTH - step
    if team:
        return geometric((1 + waiting) / 2, remaining)
    mine, others = -(-remaining // 2), remaining // 2
    return geometric(1.0, mine, GAMMA**2) + geometric(waiting * GAMMA, others, GAMMA**2)


def value_with_deaths(step: int, agent: int, *, team: bool) -> float:
    remaining = LENGTH - step
    shared = max(0, 4 - step)
    if not team:
        return geometric(1.0, shared if agent == 2 else remaining)
    return geometric(1.0, shared) + GAMMA**shared * geometric(2 / 3, remaining - shared)


def batch_of(task: tuple[Any, Any, Any], table: Tensor, *, team: bool) -> Any:
    """Return episodes of a task, one after another, with the values of a table."""
    acts, ended, reward = (rows.unsqueeze(0) for rows in task)
    over = (STEPS + 1 == LENGTH).view(1, FRAMES, 1)
    done = (ended[:, STEPS + 1] | over).unsqueeze(-1)
    if team:
        reward = reward.mean(-1, keepdim=True).expand_as(reward)
    size = [1, FRAMES, reward.shape[-1]]
    root = {
        "mask": acts[:, STEPS],
        "done": ended[:, STEPS].unsqueeze(-1),
        "state_value": table[STEPS].unsqueeze(0).unsqueeze(-1),
    }
    after = {
        "mask": acts[:, STEPS + 1] & ~done.squeeze(-1),
        "done": done,
        "terminated": done,
        "truncated": torch.zeros_like(done),
        "reward": reward[:, STEPS].unsqueeze(-1).double(),
        "state_value": table[STEPS + 1].unsqueeze(0).unsqueeze(-1),
    }
    flags = {"done": over, "terminated": over, "all": TensorDict(after, size)}
    return TensorDict({"all": TensorDict(root, size), "next": flags}, size[:2])


CASES: dict[str, Any] = {
    "turns": (turns(0.0), partial(value_in_turn, waiting=0.0)),
    "turns, paid for waiting": (turns(0.5), partial(value_in_turn, waiting=0.5)),
    "deaths": (deaths(), value_with_deaths),
}


@pytest.mark.parametrize("reward", ["agent", "team"])
@pytest.mark.parametrize("lmbda", LAMBDAS)
@pytest.mark.parametrize("case", CASES)
def test_values_learned_by_a_table_are_those_of_the_task(
    case: Any, lmbda: float, reward: str
) -> None:
    """Rows that are never trained keep garbage, which must not reach any target."""
    task, value_of = CASES[case]
    acts = task[0][STEPS]
    agents = tuple("abc")[: acts.shape[-1]]
    description = EnvDescription(
        case, {"all": GroupDescription(agents, BOX, spaces.Discrete(2))}
    )
    settings = {"gamma": GAMMA, "ppo.lmbda": lmbda, "reward": reward}
    options = TrainingOptions().with_settings(settings)
    table = torch.full((LENGTH + 1, len(agents)), 1e4, dtype=torch.float64)
    inside = torch.ones(1, FRAMES, dtype=torch.bool)
    for _ in range(2 * LENGTH + 2):
        data = batch_of(task, table, team=reward == "team")
        write_advantages(data, data, inside, description, options)
        target = data["all", "value_target"][0, ..., 0]
        trained = data["all", TRAINED][0]
        assert not (trained & ~acts).any()
        frames, rows = trained.nonzero(as_tuple=True)
        table[STEPS[frames], rows] = target[trained]
    # At most the last decision of each agent has no known outcome.
    assert int((acts & ~trained).sum()) <= 1
    for frame, agent in acts.nonzero().tolist():
        step = int(STEPS[frame])
        expected = value_of(step, agent, team=reward == "team")
        assert float(table[step, agent]) == pytest.approx(expected, rel=1e-5)


def test_the_closed_forms_give_the_numbers_known_by_hand() -> None:
    assert value_in_turn(0, 0, team=False, waiting=0.0) == pytest.approx(9.15, abs=5e-3)
    assert value_with_deaths(19, 0, team=True) == pytest.approx(2 / 3)
    assert value_with_deaths(3, 2, team=False) == 1.0


@pytest.mark.parametrize(("bootstraps", "targets"), [(True, [5, 2]), (False, [2, 2])])
def test_an_agent_stopped_alone_has_its_own_value_only_with_bootstrapping(
    bootstraps: bool, targets: list[float]
) -> None:
    group = GroupDescription(("a", "b"), BOX, spaces.Discrete(2))
    settings = {"bootstrap_limits": bootstraps, "gamma": 0.5, "reward": "team"}
    no, stopped = torch.zeros(1, 1, 2, 1).bool(), torch.tensor([[[[True], [False]]]])
    values = torch.tensor([[[[10.0], [4.0]]]])
    flags = {"done": stopped, "terminated": no, "truncated": stopped}
    of_team = TensorDict({"state_value": values, "done": no}, [1, 1, 2])
    after = flags | {"reward": torch.zeros_like(values), "state_value": values}
    root = {"done": no[:, :, 0], "terminated": no[:, :, 0]}
    data = TensorDict(
        {"team": of_team, "next": root | {"team": TensorDict(after, [1, 1, 2])}},
        [1, 1],
    )
    write_advantages(
        data,
        data,
        ~no[:, :, 0, 0],
        EnvDescription("stopped", {"team": group}),
        TrainingOptions().with_settings(settings),
    )
    assert data["team", "value_target"].flatten().tolist() == targets
    assert data["team", TRAINED].all()
