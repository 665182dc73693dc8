"""Evaluation on whole episodes, the same number from each environment."""

import os
import signal
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect import Collector, record
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.errors import ClosedError
from marl_collect.evaluation.evaluator import Evaluator, evaluate
from marl_collect.models import make_policy

pytestmark = pytest.mark.processes


def policy(td: TensorDictBase) -> TensorDictBase:
    observation = td.get(("hunter", "observation"))
    td.set(("hunter", "action"), (observation[..., 0] * 1009).long() % 4)
    return td.set(("prey", "action"), td.get(("prey", "observation"))[..., :2])


def test_a_continued_evaluation_goes_on_with_numbers_and_seeds() -> None:
    with Evaluator(policy, [CountingEnv] * 2, seeds=3) as evaluator:
        whole = evaluator.evaluate(9)
        parts = [evaluator.evaluate(n, first=k) for k, n in ((0, 4), (4, 7), (7, 9))]
    assert [[e.environment for e in part.episodes] for part in parts] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [7, 8],
    ]
    assert [e for part in parts for e in part.episodes] == list(whole.episodes)
    assert len(set(whole.team_returns)) > 4


class LoggedResets(EnvWrapper):
    """Writes a line for each reset."""

    def __init__(self, log: Path) -> None:
        super().__init__(CountingEnv())
        self._log = log

    def after_reset(self, begun: Any, seed: Any) -> None:
        with self._log.open("a") as file:
            file.write(f"{seed}\n")


def test_an_episode_needs_one_reset(tmp_path: Path) -> None:
    """A reset of MeltingPot takes as long as a thousand steps."""
    log = tmp_path / "resets"
    options: dict[str, Any] = {"num_workers": 2, "envs_per_worker": 2}
    with Evaluator(
        policy, partial(LoggedResets, log), **options, max_frames_per_traj=3
    ) as evaluator:
        first = evaluator.evaluate(episodes=8)
        assert first.lengths == [3] * 8
        assert len(log.read_text().split()) == 8
        assert evaluator.evaluate(episodes=8) == first
    assert list(Counter(log.read_text().split()).values()) == [2] * 8


class DiesOnce(EnvWrapper):
    """Kills its process in the second episode; writes a line for each process."""

    def __init__(self, log: Path) -> None:
        super().__init__(CountingEnv(min_length=150, max_length=150, deaths=False))
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._is_first = len(log.read_text().split()) == 1
        self._episodes = self._steps = 0

    def after_reset(self, begun: Any, seed: Any) -> None:
        self._episodes += 1
        self._steps = 0

    def before_step(self) -> None:
        assert self._steps < 150, "an episode is stepped after its end"
        self._steps += 1
        if self._is_first and self._episodes == 2 and self._steps == 80:
            os.kill(os.getpid(), signal.SIGKILL)


def test_an_episode_that_was_lost_with_its_worker_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "processes"
    evaluation = evaluate(
        policy,
        partial(DiesOnce, log),
        episodes=3,
        num_workers=1,
        on_worker_failure="restart",
    )
    assert evaluation.lengths == [150] * 3
    assert len(set(log.read_text().split())) == 2


def test_workers_that_are_replaced_play_the_episodes_of_the_given_seeds() -> None:
    long = partial(CountingEnv, min_length=60, max_length=90)
    options: Any = {"episodes": 5, "seeds": [5, 11, 2**31 - 2, 0, 5]}
    expected = evaluate(policy, long, **options)
    replaced = evaluate(policy, long, **options, num_workers=2, max_worker_rss=1)
    assert replaced == expected
    assert len(set(expected.team_returns)) == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": [1, 2]}, ValueError, "3 episodes, but 2 seeds"),
        ({"seeds": [1, 2, -3]}, ValueError, "below 2..63, but found -3"),
        ({"seeds": [1, 2, 0.5]}, ValueError, "below 2..63, but found 0.5"),
        ({"seeds": -1}, ValueError, "below 2..63, but found -1"),
        ({"seeds": [1, 2, 2**63]}, ValueError, "below 2..63, but found 92233"),
        ({"seeds": None}, ValueError, "below 2..63, but found None"),
        ({"seed": 1}, TypeError, "takes seeds"),
        (
            {"seeds": [1, 2, 3], "on_worker_failure": "restart"},
            ValueError,
            "seeds=.*a seed to each",
        ),
    ],
)
def test_invalid_seeds_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluate(None, CountingEnv, episodes=3, **options)


def test_the_old_name_of_the_limit_is_accepted_with_a_warning() -> None:
    old: Any = {"max_episode_frames": 3}
    with pytest.warns(DeprecationWarning, match="now called max_frames_per_traj"):
        evaluation = evaluate(None, CountingEnv, episodes=4, **old)
    assert evaluation == evaluate(None, CountingEnv, episodes=4, max_frames_per_traj=3)
    with pytest.raises(TypeError, match="max_frames_per_traj and its other name"):
        evaluate(None, CountingEnv, episodes=4, max_frames_per_traj=3, **old)


def test_episodes_that_seem_endless_are_reported() -> None:
    long = partial(CountingEnv, min_length=10_050, max_length=10_050, deaths=False)
    with pytest.warns(UserWarning, match="environment 0 has not ended after 10,000"):
        evaluation = evaluate(None, long, episodes=1)
    assert evaluation.lengths == [10_050]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limited = evaluate(None, long, episodes=1, max_frames_per_traj=20_000)
    assert limited == evaluation


def test_an_evaluation_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl_collect.evaluation.evaluator.LONGEST", 500)
    endless = partial(CountingEnv, min_length=10**9, max_length=10**9, deaths=False)
    with pytest.raises(RuntimeError, match=r"environment 1 has .* after 600 frames\."):
        evaluate(None, [CountingEnv, endless], episodes=2)
    evaluation = evaluate(None, endless, episodes=1, max_frames_per_traj=700)
    assert evaluation.lengths == [700]
    finite = partial(endless, min_length=200, max_length=200)
    assert evaluate(None, finite, episodes=4).lengths == [200] * 4


def test_options_about_batches_are_refused() -> None:
    refused: Any = {"split_trajs": True, "total_frames": 9}
    with pytest.raises(TypeError, match="takes no split_trajs: evaluation does not"):
        evaluate(None, CountingEnv, episodes=1, **refused)


def test_an_evaluator_gives_the_results_of_a_new_one() -> None:
    """Regardless of earlier evaluations and of their order."""
    options: Any = {"num_workers": 2, "envs_per_worker": 2, "deterministic": False}
    fresh = {
        seed: evaluate(None, CountingEnv, episodes=8, seeds=seed, **options)
        for seed in (3, 4)
    }
    with Evaluator(None, CountingEnv, seeds=3, **options) as evaluator:
        pids = evaluator.worker_pids
        assert evaluator.evaluate(8) == fresh[3]
        assert evaluator.evaluate(8, seeds=4) == fresh[4]
        assert evaluator.evaluate(8) == fresh[3]
        assert evaluator.worker_pids == pids
    assert fresh[3] != fresh[4]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_evaluator_acts_with_the_current_weights() -> None:
    torch.manual_seed(1)
    env = partial(CountingEnv, n_prey=0)
    module = make_policy(env(), num_cells=[8])
    other = make_policy(env(), num_cells=[8])
    evaluations = {}
    for name, policy in {"module": module, "other": other}.items():
        evaluations[name] = evaluate(policy, env, episodes=6)
    with Evaluator(other, env) as evaluator:
        weights = {name: value.clone() for name, value in other.state_dict().items()}
        other.load_state_dict(module.state_dict())  # Before the first evaluation.
        assert evaluator.evaluate(6) == evaluations["module"]
        other.load_state_dict(weights)
    with Evaluator(module, env) as evaluator:
        assert evaluator.evaluate(6) == evaluations["module"]
        assert evaluator.evaluate(6, weights=other) == evaluations["other"]
        assert evaluator.evaluate(6) == evaluations["module"]
        module.load_state_dict(other.state_dict())
        assert evaluator.evaluate(6) == evaluations["other"]
    assert evaluations["module"] != evaluations["other"]


def test_an_evaluator_stays_usable_after_weights_that_do_not_fit() -> None:
    env = partial(CountingEnv, n_prey=0)
    narrow, wide = (make_policy(env(), num_cells=[n]) for n in (8, 16))
    with Evaluator(narrow, env) as evaluator:
        expected = evaluator.evaluate(6)
        with pytest.raises(ValueError, match=r"is \(16, 5\) torch.float32, but"):
            evaluator.evaluate(6, weights=wide)
        assert evaluator.evaluate(6) == expected


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((2.5, 0), TypeError, "episodes must be an integer .*2.5"),
        ((True, 0), TypeError, "episodes must be an integer .*True"),
        ((0, 0), ValueError, "episodes must be an integer of at least 1"),
        ((2, 1.0), TypeError, "first must be an integer .*1.0"),
        ((2, -1), ValueError, "first must be an integer of at least 0"),
        ((2, 2), ValueError, "more than first, but is 2"),
    ],
)
def test_counts_are_checked(numbers: Any, error: type[Exception], message: str) -> None:
    episodes, first = numbers
    with Evaluator(None, CountingEnv) as evaluator, pytest.raises(error, match=message):
        evaluator.evaluate(episodes, first=first)


def test_a_closed_evaluator_raises_an_error() -> None:
    evaluator = Evaluator(None, CountingEnv)
    evaluator.close()
    evaluator.close()
    with pytest.raises(ClosedError, match="Evaluator"):
        evaluator.evaluate(1)


def means_by_hand(hunters: Any, prey: Any, lengths: Any) -> dict[str, Any]:
    """Means over episodes, from the returns of agents ``[episodes, agents]``."""
    return {
        "mean_team_return": (hunters.sum(1) + prey.sum(1)).mean(),
        "mean_agent_return": np.concatenate([hunters, prey], 1).mean(),
        "mean_group_returns": {"hunter": hunters.mean(), "prey": prey.mean()},
        "mean_returns": {"hunter": list(hunters.mean(0)), "prey": list(prey.mean(0))},
        "mean_length": np.mean(lengths),
    }


def test_evaluations_collectors_and_datasets_name_means_alike(tmp_path: Path) -> None:
    with Collector(CountingEnv, frames_per_batch=200, seed=3) as collector:
        collector.next()
        stats = collector.stats()
    evaluation = evaluate(None, CountingEnv, episodes=6, seeds=3)
    dataset = record(tmp_path, CountingEnv, episodes=6, seed=3)
    played = evaluation.episodes
    recorded = dataset.trajectories
    returns: list[tuple[Any, ...]] = [
        (
            evaluation,
            *(np.array([e.returns[g] for e in played]) for g in ("hunter", "prey")),
            [episode.length for episode in played],
        ),
        (
            SimpleNamespace(**recorded.stats()),
            *(recorded.agent_returns[g] for g in ("hunter", "prey")),
            recorded.lengths,
        ),
    ]
    for owner, hunters, prey, lengths in returns:
        expected = means_by_hand(hunters, prey, lengths)
        assert {name for name in stats if name.startswith("mean_")} == set(expected)
        assert hunters.mean() != prey.mean()
        for name, value in expected.items():
            mean = getattr(owner, name)
            if not isinstance(value, dict):
                mean, value = {"all": mean}, {"all": value}
            assert mean.keys() == value.keys()
            for group, number in value.items():
                assert mean[group] == pytest.approx(number), name
