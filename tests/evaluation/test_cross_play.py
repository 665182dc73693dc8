"""Cross-play and scenarios measure the return of a population among another."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import PolicyPool
from marl_collect.envs import PettingZooEnv
from marl_collect.evaluation import Scenario, cross_play, evaluate_scenarios
from marl_collect.evaluation.cross_playing import sampled_half
from marl_collect.models import make_policy

pytestmark = pytest.mark.processes

ROCK, PAPER, SCISSORS = range(3)
ROUNDS = 15


def rps() -> PettingZooEnv:
    """Rock, paper, scissors; the return is the number of wins minus losses."""
    return PettingZooEnv("rps_v2", max_cycles=ROUNDS)


class Shows(nn.Module):
    """Always shows one hand."""

    def __init__(self, hand: int) -> None:
        super().__init__()
        self.hand = nn.Parameter(torch.tensor(float(hand)))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        shape = td["player", "done"][..., 0]
        td["player", "action"] = (torch.zeros_like(shape) + self.hand).long()
        return td


@pytest.mark.parametrize("workers", [1, 2])
def test_every_policy_plays_with_every_policy(tmp_path: Path, workers: int) -> None:
    policies = {"rock": Shows(ROCK), "paper": Shows(PAPER), "scissors": Shows(SCISSORS)}
    options: Any = {"num_workers": workers, "envs_per_worker": 2}
    result = cross_play(policies, rps, episodes=3, **options)
    expected = ROUNDS * np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])
    assert result.returns.shape == (3, 3, 3)
    assert (result.means == expected).all()
    interval = result.interval("rock", "scissors")
    assert (interval.value, interval.low, interval.high) == (15, 15, 15)
    row = "| rock | 0.00 (0.00 to 0.00) | -15.0 (-15.0 to -15.0) |"
    assert row in result.to_markdown()
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


def test_seats_decide_who_acts_for_the_row() -> None:
    policies = {"rock": Shows(ROCK), "paper": Shows(PAPER)}
    result = cross_play(policies, rps, episodes=2, seats=lambda _, agents: agents)
    # If all seats are the row's, the column has no influence.
    assert (result.means == 0).all()
    with pytest.raises(ValueError, match="seats must return some of the agents"):
        cross_play(policies, rps, episodes=1, seats=lambda *_: [])
    nothing: Any = {"seats": lambda *_: None}
    with pytest.raises(ValueError, match="but returned None for the seed 0"):
        cross_play(policies, rps, episodes=1, **nothing)
    narrow: Any = {"seats": lambda seed: ["player_0"]}
    with pytest.raises(TypeError, match="function of an episode's seed and all agents"):
        cross_play(policies, rps, episodes=1, **narrow)
    with pytest.raises(KeyError, match="no policy 'stone': the policies are"):
        result.interval("stone", "stone")
    with pytest.raises(ValueError, match="There are no policies"):
        cross_play({}, rps, episodes=1)


def test_half_of_the_agents_is_sampled_as_documented() -> None:
    """The numbers are those of docs/architecture.md ("Seeds")."""
    halves = [sampled_half(seed, ("a", "b", "c")) for seed in range(4)]
    assert halves == [["b", "a"], ["b", "a"], ["c", "a"], ["c", "a"]]


def test_returns_are_those_of_the_agents_that_were_chosen() -> None:
    rng = random.Random(0)  # Other agents in each call, whatever the seed is.
    result = cross_play(
        {"rock": Shows(ROCK), "paper": Shows(PAPER)},
        rps,
        episodes=20,
        seats=lambda _, agents: rng.sample(agents, 1),
    )
    assert (result.means == [[0, -ROUNDS], [ROUNDS, 0]]).all()


def test_keywords_of_environments_are_used() -> None:
    def rounds(max_cycles: int) -> PettingZooEnv:
        return PettingZooEnv("rps_v2", max_cycles=max_cycles)

    kwargs = {"max_cycles": 4}
    policies = {"rock": Shows(ROCK), "paper": Shows(PAPER)}
    result = cross_play(policies, rounds, episodes=1, create_env_kwargs=kwargs)
    assert (result.means == [[0, -4], [4, 0]]).all()
    scenario = Scenario("x", rounds, ["player_0"], Shows(PAPER))
    (score,) = evaluate_scenarios(
        Shows(ROCK), [scenario], episodes=1, create_env_kwargs=kwargs
    )
    assert score.returns == [-4]


def never() -> PettingZooEnv:
    raise AssertionError


def test_policies_are_checked_before_a_process_starts() -> None:
    with pytest.raises(TypeError, match=r"policies\['b'\] must be a TensorDictModule"):
        cross_play({"a": None, "b": 3}, never, episodes=1)
    scenarios = [Scenario("good", never), Scenario("bad", never, ["player_0"], 3)]
    with pytest.raises(TypeError, match=r"policies\['background_policy'\]") as raised:
        evaluate_scenarios(None, scenarios, episodes=1)
    assert "scenario 'bad'" in raised.value.__notes__[0]
    scenario: Any = Scenario("good", never)
    with pytest.raises(TypeError, match=r"scenarios must be a list: pass \[scenario\]"):
        evaluate_scenarios(None, scenario, episodes=1)
    for focal in (None, ["player_0", "player_1"]):
        everybody = Scenario("full", rps, focal=focal, background=Shows(PAPER))
        with pytest.raises(ValueError, match="'full' are focal, so nobody plays with"):
            evaluate_scenarios(None, [everybody], episodes=1)
    narrow = make_policy(rps)
    wrong = [
        Scenario("own", rps, focal=["player_0"], background=Shows(PAPER)),
        Scenario("other", CountingEnv),
    ]
    with pytest.raises(Exception, match="The policy reads") as misfit:
        evaluate_scenarios(narrow, wrong, episodes=1)
    first, text, score = misfit.value.__notes__[-3:]
    assert (first, text) == ("Raised in scenario 'other'.", "The scores before it:")
    assert score.startswith("own: ")  # Not lost.


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"episodes": 0}, ValueError, "episodes must be an integer of at least 1"),
    ({"episodes": "3"}, TypeError, "episodes must be an integer"),
    ({"seed": -1}, ValueError, "seed must be an integer of at least 0, but is -1"),
    ({"seeds": 3}, TypeError, "takes no seeds: it assigns .* seeds from seed on"),
    ({"num_worker": 2}, TypeError, r"no argument 'num_worker'.*Did you mean num_work"),
    ({"frames_per_batch": 2}, TypeError, "evaluation does not return batches"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_wrong_arguments_err_before_a_process_starts(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    options = {"episodes": 1} | wrong
    with pytest.raises(error, match=text):
        cross_play({"a": None}, never, **options)
    with pytest.raises(error, match=text):
        evaluate_scenarios(None, [Scenario("a", never)], **options)


def test_a_pool_plays_with_its_versions() -> None:
    net = Shows(ROCK)
    pool = PolicyPool(net, size=4)
    with torch.no_grad():
        net.hand.fill_(PAPER)
    pool.update()
    result = cross_play(pool, rps, episodes=1)
    assert result.names == ("version_0", "version_1")
    assert (result.means == [[0, -ROUNDS], [ROUNDS, 0]]).all()
    pool = PolicyPool(net, size=3)
    pool.add(1)
    assert cross_play(pool, rps, episodes=1).names == ("version_0", "version_1")
    pool = PolicyPool(net, size=2)
    for version in range(1, 11):
        pool.add(version % 2)
    names = [f"version_{version}" for version in sorted(pool.versions.tolist())]
    assert "version_10" in names
    assert len(names) == 2
    assert cross_play(pool, rps, episodes=1).names == tuple(names)


def test_scenarios_measure_the_focal_players_only() -> None:
    rock, paper, scissors = Shows(ROCK), Shows(PAPER), Shows(SCISSORS)
    scenarios = [
        Scenario("beaten", rps, ["player_1"], paper, reference=(-30, 30)),
        Scenario("mixed", rps, ["player_0"], {"a": paper, "b": scissors}),
        Scenario("alone", rps),
    ]
    beaten, mixed, rocks_only = evaluate_scenarios(rock, scenarios, episodes=40)
    assert beaten.returns == [-ROUNDS] * 40
    assert beaten.score.value == -ROUNDS
    assert beaten.normalised is not None
    assert beaten.normalised.value == 0.25
    assert mixed.normalised is None
    assert set(mixed.returns) == {-ROUNDS, ROUNDS}
    assert mixed.score.low < mixed.score.value < mixed.score.high
    assert rocks_only.returns == [0] * 40


def test_a_focal_population_is_sampled_for_each_agent() -> None:
    population = {"rock": Shows(ROCK), "paper": Shows(PAPER)}
    scenario = Scenario("one", rps, ["player_0"], Shows(ROCK))
    (result,) = evaluate_scenarios(population, [scenario], episodes=30)
    assert set(result.returns) == {0, ROUNDS}
    repeated = evaluate_scenarios(population, [scenario], episodes=30)[0]
    assert repeated.returns == result.returns


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (Scenario("x", rps, ["walker_0"]), r"must be some of \['player_0', 'player_1'"),
        (Scenario("x", rps, []), "focal agents of scenario 'x'"),
        (Scenario("x", rps, "player_0"), "but are 'player_0'"),
        (Scenario("x", rps, reference=(1, 1)), "reference scores .* are equal"),
    ],
)
def test_scenarios_are_checked_before_the_first(scenario: Scenario, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        evaluate_scenarios(Shows(ROCK), [Scenario("good", rps), scenario], episodes=1)
