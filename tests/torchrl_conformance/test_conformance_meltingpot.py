"""MeltingPot's substrates: keys, shapes, dtypes, groups, limits."""

import importlib.util
from typing import Any

import pytest
import torch
from conformance_tools import Implementation

if importlib.util.find_spec("meltingpot") is None:
    pytest.skip("needs dm-meltingpot", allow_module_level=True)
SUBSTRATE, AGENTS = "coins", 2
"""A small one, because large ones take seconds to reset."""
PRIVATE = "MISMATCHED_COIN_COLLECTED_BY_PARTNER"


def build(implementation: Implementation) -> Any:
    """Return a substrate that ends after four steps."""
    return implementation.MeltingpotEnv(SUBSTRATE, max_steps=4)


def play(substrate: Any) -> Any:
    """Return an episode."""
    return substrate.rollout(99)


@pytest.fixture
def substrate(implementation: Any, shared: Any) -> Any:
    """Return a substrate that all tests of a library share."""
    return shared(build, implementation)


@pytest.fixture
def rollout(substrate: Any, shared: Any) -> Any:
    """Return an episode that all tests of a library share."""
    return shared(play, substrate)


def test_all_players_are_one_group(substrate: Any) -> None:
    assert substrate.group_map == {"agents": [f"player_{i}" for i in range(AGENTS)]}


@pytest.mark.parametrize(
    ("key", "dtype", "shape"),
    [
        (("agents", "observation", "RGB"), torch.uint8, (88, 88, 3)),
        (("agents", "observation", PRIVATE), torch.float64, (1,)),
        (("agents", "action"), torch.int64, ()),
    ],
)
def test_entries_of_players(
    rollout: Any, key: tuple[str, ...], dtype: Any, shape: tuple[int, ...]
) -> None:
    assert rollout["agents"].batch_size == (4, AGENTS)
    assert rollout[key].dtype == dtype
    assert rollout[key].shape == (4, AGENTS, *shape)
    assert rollout["next", "agents", "reward"].shape == (4, AGENTS, 1)
    assert ("agents", "mask") not in rollout.keys(True)


def test_the_world_is_seen_at_the_root(rollout: Any) -> None:
    assert rollout["RGB"].shape == (4, 136, 136, 3)
    assert ("agents", "observation", "WORLD.RGB") not in rollout.keys(True)


def test_rewards_have_the_substrate_s_dtype(rollout: Any) -> None:
    assert rollout["next", "agents", "reward"].dtype == torch.float64


def test_an_episode_has_at_most_max_steps(rollout: Any) -> None:
    assert rollout.shape == (4,)
    assert rollout["next", "done"].flatten().tolist() == [False, False, False, True]


def test_max_steps_terminate(rollout: Any) -> None:
    assert rollout["next", "terminated"][-1]


def test_only_the_environment_is_done(rollout: Any) -> None:
    assert ("next", "agents", "done") not in rollout.keys(True)


def test_steps_are_counted_anew_in_every_episode(substrate: Any, rollout: Any) -> None:
    assert rollout.shape == (4,)
    td = substrate.rollout(6, break_when_any_done=False)
    assert td["next", "done"].flatten().tolist() == [
        index % 4 == 3 for index in range(6)
    ]


def test_substrates_cannot_be_seeded(substrate: Any) -> None:
    with pytest.raises(NotImplementedError):
        substrate.set_seed(0)


def test_groups_are_given(implementation: Any) -> None:
    players = [f"player_{i}" for i in range(AGENTS)]
    groups = {"first": players[1:], "others": players[:1]}
    env = implementation.MeltingpotEnv(SUBSTRATE, group_map=groups)
    td = env.reset()
    assert td["first", "observation", "RGB"].shape == (1, 88, 88, 3)
    assert td["others", "observation", "RGB"].shape == (1, 88, 88, 3)
    env.close()


def test_an_unknown_substrate_is_an_error(implementation: Any) -> None:
    with pytest.raises((KeyError, ValueError, ImportError, RuntimeError)):
        implementation.MeltingpotEnv("no_such_substrate")
