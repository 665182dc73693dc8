"""Evaluation on whole episodes, cross-play, scenarios, and intervals of returns."""

import itertools
import math
import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector, PolicyPool, record
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.errors import ClosedError
from marl_collect.evaluation import CrossPlay, Scenario, cross_play, evaluate_scenarios
from marl_collect.evaluation.cross_playing import sampled_half
from marl_collect.evaluation.evaluator import Evaluator, evaluate
from marl_collect.evaluation.intervals import bootstrap, interquartile_mean, rank_sum_p
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


AGENTS = ["hunter_0", "hunter_1", "prey_0", "prey_1", "prey_2"]


class Constant(nn.Module):
    """Every agent of ``CountingEnv`` takes the same action in all frames."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the actions."""
        for group in {"hunter", "prey"} & {*td.keys()}:
            action = torch.zeros_like(td[group, "done"][..., 0]) + self.number
            if group == "prey":
                td[group, "action"] = torch.stack([action / 8, 0 * action], -1)
            else:
                td[group, "action"] = action.long()
        return td


def returns_of(seed: int, numbers: Mapping[str, int]) -> dict[str, int]:
    """Play an episode of ``CountingEnv`` by its rules; each agent has one action."""
    counts, digits, total = {}, {}, dict.fromkeys(numbers, 0)
    for agent, number in numbers.items():
        group, index = agent.split("_")
        counts[agent] = (seed + 37 * int(index) + (group == "prey")) % 1009
        digits[agent] = 100 * number // 8 if group == "prey" else number
    for _ in range(5 + seed % 11):
        for agent in list(counts):
            counts[agent] = (31 * counts[agent] + digits[agent] + 1) % 1009
            total[agent] += counts[agent] % 7 - 3
            if counts[agent] % 13 == 0:  # It dies.
                del counts[agent]
    return total


@pytest.mark.parametrize("seed", range(10))
def test_matrices_and_scenarios_have_the_returns_of_chosen_agents(seed: int) -> None:
    pick = random.Random(seed)
    sizes = {"n_hunters": pick.randint(1, 3), "n_prey": pick.randint(0, 3)}
    names = zip(("hunter", "prey"), sizes.values(), strict=True)
    agents = [f"{group}_{i}" for group, n in names for i in range(n)]
    shown = {f"policy {n}": n for n in pick.sample(range(4), pick.randint(1, 3))}
    policies = {name: Constant(number) for name, number in shown.items()}
    options: dict[str, Any] = {
        "episodes": pick.randint(1, 4),
        "seed": pick.choice([0, 5, 2000]),
        "num_workers": pick.randint(1, 2),
        "envs_per_worker": pick.randint(1, 2),
        "create_env_kwargs": sizes,
    }
    episodes, first = range(options["episodes"]), options["seed"]
    seated: list[list[str]] = []

    def seats(_: int, everybody: tuple[str, ...]) -> list[str]:
        seated.append(pick.sample(everybody, pick.randint(1, len(everybody))))
        return seated[-1]

    result = cross_play(policies, CountingEnv, seats=seats, **options)
    assert result.names == tuple(shown)
    assert result.returns.shape == (len(shown), len(shown), len(episodes))
    cells = itertools.product(shown, shown, episodes)
    for number, (row, column, _) in enumerate(cells):
        chosen = seated[number]
        acts = {agent: shown[row if agent in chosen else column] for agent in agents}
        total = returns_of(first + number, acts)
        expected = np.mean([total[agent] for agent in chosen])
        assert result.returns.flat[number] == pytest.approx(expected)
    focal = pick.sample(agents, pick.randint(1, len(agents)))
    others = None if len(focal) == len(agents) else Constant(3)
    scenario = Scenario("x", CountingEnv, focal, others, reference=(-4.0, 6.0))
    name = pick.choice(list(shown))
    (score,) = evaluate_scenarios(policies[name], [scenario], **options)
    acts = {agent: shown[name] if agent in focal else 3 for agent in agents}
    totals = [returns_of(first + number, acts) for number in episodes]
    means = [np.mean([total[agent] for agent in focal]) for total in totals]
    assert score.returns == pytest.approx(means)
    assert score.score.value == pytest.approx(np.mean(means))
    assert score.normalised is not None
    assert score.normalised.value == pytest.approx((np.mean(means) + 4) / 10)


def test_a_focal_population_is_sampled_for_each_agent() -> None:
    """Background policies are, too; agents of ``CountingEnv`` act alone."""
    population = {"one": Constant(1), "two": Constant(2)}
    others = {"zero": Constant(0), "three": Constant(3)}
    scenarios = [
        Scenario("with others", CountingEnv, ["hunter_1", "prey_2"], others),
        Scenario("alone", CountingEnv),
    ]
    scores = evaluate_scenarios(population, scenarios, episodes=30)
    for score, focal in zip(scores, (["hunter_1", "prey_2"], AGENTS), strict=True):
        found = set()
        for seed, mean in enumerate(score.returns):
            for acts in itertools.product((1, 2), repeat=len(focal)):
                total = returns_of(seed, dict(zip(focal, acts, strict=True)))
                if np.mean(list(total.values())) == pytest.approx(mean):
                    found.add(acts)
        assert len(found) > 2  # Agents of an episode have different policies.
        assert score.normalised is None
        assert score.score.low < score.score.value < score.score.high
    again = evaluate_scenarios(population, iter(scenarios), episodes=30)  # type: ignore[arg-type]
    assert [score.returns for score in again] == [score.returns for score in scores]


def test_a_matrix_is_a_table_and_a_picture(tmp_path: Path) -> None:
    returns = 15 * np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])[..., None]
    names = ("rock", "pa|per", "$sci_{$")  # No column begins, and no formula.
    result = CrossPlay(names, returns.repeat(3, -1).astype(float))
    interval = result.interval("rock", "$sci_{$")
    assert (interval.value, interval.low, interval.high) == (15, 15, 15)
    row = "| rock | 0.00 (0.00 to 0.00) | -15.0 (-15.0 to -15.0) |"
    heading, _, *rows = result.to_markdown().splitlines()
    assert heading == r"|  | rock | pa\|per | $sci_{$ |"
    assert rows[0].startswith(row)
    assert rows[1].startswith(r"| pa\|per | 15.0 ")
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


def test_seats_that_cannot_be_are_refused() -> None:
    policies = {"one": Constant(1), "two": Constant(2)}
    result = cross_play(policies, CountingEnv, episodes=1)
    with pytest.raises(ValueError, match="seats must return some of the agents"):
        cross_play(policies, CountingEnv, episodes=1, seats=lambda *_: [])
    nothing: Any = {"seats": lambda *_: None}
    with pytest.raises(ValueError, match="but returned None for the seed 0"):
        cross_play(policies, CountingEnv, episodes=1, **nothing)
    narrow: Any = {"seats": lambda seed: ["prey_0"]}
    with pytest.raises(TypeError, match="function of an episode's seed and all agents"):
        cross_play(policies, CountingEnv, episodes=1, **narrow)
    with pytest.raises(KeyError, match="no policy 'stone': the policies are"):
        result.interval("stone", "stone")
    with pytest.raises(ValueError, match="There are no policies"):
        cross_play({}, CountingEnv, episodes=1)


def test_half_of_the_agents_is_sampled_as_documented() -> None:
    """The numbers are those of docs/architecture.md ("Seeds")."""
    halves = [sampled_half(seed, ("a", "b", "c")) for seed in range(4)]
    assert halves == [["b", "a"], ["b", "a"], ["c", "a"], ["c", "a"]]


def never() -> CountingEnv:
    raise AssertionError


def test_policies_are_checked_before_a_process_starts() -> None:
    with pytest.raises(TypeError, match=r"policies\['b'\] must be a TensorDictModule"):
        cross_play({"a": None, "b": 3}, never, episodes=1)
    scenarios = [Scenario("good", never), Scenario("bad", never, ["prey_0"], 3)]
    with pytest.raises(TypeError, match=r"policies\['background_policy'\]") as raised:
        evaluate_scenarios(None, scenarios, episodes=1)
    assert "scenario 'bad'" in raised.value.__notes__[0]
    scenario: Any = Scenario("good", never)
    with pytest.raises(TypeError, match=r"scenarios must be a list: pass \[scenario\]"):
        evaluate_scenarios(None, scenario, episodes=1)
    with pytest.raises(TypeError, match="must be a Scenario, but is 'good'"):
        evaluate_scenarios(None, ["good"], episodes=1)  # type: ignore[list-item]
    for focal in (None, AGENTS):
        everybody = Scenario("full", CountingEnv, focal=focal, background=Constant(2))
        with pytest.raises(ValueError, match="'full' are focal, so nobody plays with"):
            evaluate_scenarios(None, [everybody], episodes=1)
    narrow = make_policy(CountingEnv)
    wrong = [
        Scenario("own", CountingEnv, focal=["prey_0"], background=Constant(2)),
        Scenario("other", partial(CountingEnv, n_prey=0)),
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


@pytest.mark.parametrize("versions", [1, 2, 11])
def test_a_pool_plays_with_its_versions(versions: int) -> None:
    net = Constant(0)
    pool = PolicyPool(net, size=4)
    for version in range(1, versions):
        with torch.no_grad():
            net.number.fill_(version % 4)
        pool.update()
    newest = range(versions)[-4:]
    result = cross_play(pool, CountingEnv, episodes=1, seats=lambda *_: ["hunter_1"])
    assert result.names == tuple(f"version_{version}" for version in newest)
    expected = [
        returns_of(len(newest) * row + column, {"hunter_1": version % 4})["hunter_1"]
        for row, version in enumerate(newest)
        for column in range(len(newest))
    ]
    assert result.returns.flatten().tolist() == expected


WRONG_SCORES: list[Any] = [(1, 1), (1,), (1, 2, 3), ("0", "1"), (0, math.nan)]


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (
            Scenario("x", CountingEnv, ["walker_0"]),
            r"some of \['hunter_0', ",
        ),
        (Scenario("x", CountingEnv, []), "focal agents of scenario 'x'"),
        (Scenario("x", CountingEnv, "prey_0"), "but are 'prey_0'"),
        *(
            (Scenario("x", CountingEnv, reference=scores), "be two different finite")
            for scores in WRONG_SCORES
        ),
    ],
)
def test_scenarios_are_checked_before_the_first(scenario: Scenario, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        evaluate_scenarios(None, [Scenario("good", CountingEnv), scenario], episodes=1)


def test_eight_scores_are_averaged_over_the_middle_four() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == pytest.approx(3.5)


def test_of_three_scores_the_outer_two_have_weight_one_quarter() -> None:
    # The middle half of three is 0.75 to 2.25: a quarter, one whole, a quarter.
    assert interquartile_mean([0, 1, 8]) == pytest.approx((0.25 * 0 + 1 + 2) / 1.5)


def test_an_axis_is_averaged_row_by_row() -> None:
    rows = np.array([[1.0, 2, 3, 4], [10.0, 20, 30, 40]])
    assert interquartile_mean(rows, axis=1) == pytest.approx([2.5, 25])


def test_one_score_has_no_spread_and_strata_are_resampled_separately() -> None:
    assert str(bootstrap([[2.0]])) == "2.00 (2.00 to 2.00)"
    assert str(bootstrap([[-20.04]])) == "-20.0 (-20.0 to -20.0)"
    # Each stratum has equal scores, so every resample is the same.
    apart = bootstrap([[0.0] * 4, [10.0] * 4])
    assert (apart.low, apart.value, apart.high) == (5, 5, 5)
    together = bootstrap([[0.0] * 4 + [10.0] * 4])
    assert together.low < 5 < together.high


def test_a_stratum_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap([[1.0], []])


@pytest.mark.parametrize("sizes", [(3, 3), (3, 6), (5, 5), (7, 7)])
@pytest.mark.parametrize("digits", [1, 15])
def test_the_rank_sum_test_equals_scipys(sizes: tuple[int, int], digits: int) -> None:
    """One digit has ties. Scipy's takes seconds for ten scores each."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=size).round(digits) for size in sizes)
    every = stats.PermutationMethod(n_resamples=np.inf)
    expected = stats.mannwhitneyu(one, two + 0.5, method=every).pvalue
    assert rank_sum_p(one, two + 0.5) == pytest.approx(expected)


@pytest.mark.parametrize("estimate", [interquartile_mean, np.mean])
@pytest.mark.parametrize("sizes", [(5,), (10,), (3, 6)])
def test_intervals_equal_scipys_up_to_chance(sizes: Any, estimate: Any) -> None:
    """Scipy's bootstrap refuses a stratum of one score, which has an interval here."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    strata = [rng.normal(size=size) for size in sizes]

    def joined(*samples: Any, axis: int = -1) -> Any:
        return estimate(np.concatenate(samples, axis), axis=axis)

    low, high = stats.bootstrap(
        strata, joined, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    interval = bootstrap(strata, estimate=estimate, repetitions=20_000)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.03)
