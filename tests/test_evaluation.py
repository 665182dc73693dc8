"""Whole episodes, the same number from each environment."""

import pytest
from tensordict import TensorDictBase

from marl_collect.evaluation import evaluate
from marl_collect.testing.counting import CountingEnv


def policy(td: TensorDictBase) -> TensorDictBase:
    seen = td.get(("hunter", "observation"))
    td.set(("hunter", "action"), (seen[..., 0] * 1009).long() % 4)
    return td.set(("prey", "action"), td.get(("prey", "observation"))[..., :2])


def test_every_environment_gives_its_first_episodes() -> None:
    found = evaluate(policy, [CountingEnv] * 2, episodes=10, seed=3)
    assert [e.environment for e in found.episodes] == [0] * 5 + [1] * 5
    assert found.lengths == [e.length for e in found.episodes]
    team = [sum(map(sum, e.returns.values())) for e in found.episodes]
    assert found.team_returns == team
    assert found.mean_team_return == pytest.approx(sum(team) / 10)
    assert found.mean_agent_return == pytest.approx(sum(team) / 10 / 5)


def test_result_does_not_depend_on_the_workers() -> None:
    one = evaluate(policy, [CountingEnv] * 4, episodes=8, num_workers=1)
    two = evaluate(policy, [CountingEnv] * 4, episodes=8, num_workers=2)
    assert one == two


def test_long_episodes_can_be_cut() -> None:
    found = evaluate(None, CountingEnv, episodes=4, max_episode_frames=3)
    assert max(found.lengths) <= 3


def test_no_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="episodes"):
        evaluate(None, CountingEnv, episodes=0)


def test_options_about_batches_are_refused() -> None:
    with pytest.raises(TypeError, match="takes no split_trajs, total_frames"):
        evaluate(None, CountingEnv, episodes=1, split_trajs=True, total_frames=9)
