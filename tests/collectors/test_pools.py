"""Past versions of a policy act in collectors, and are saved with them."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Evaluator, PolicyPool
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.policies.pool import Sample

Agents = tuple[str, ...]


class Shift(nn.Module):
    """Acts by comparisons; its one weight is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        observation = (td["hunter", "observation"][..., 0] * 1009).round() + self.weight
        td["hunter", "action"] = observation.long() % 4
        td["hunter", "weight"] = torch.zeros_like(observation) + self.weight
        td["prey", "action"] = td["prey", "observation"][..., :2] * 2 - 1
        return td


def against_the_past(seed: int, agents: Agents) -> dict[str, str]:
    learner = agents[seed % 2]
    return {agent: "main" if agent == learner else "past" for agent in agents}


def train(collector: Any, pool: PolicyPool, batches: int) -> TensorDict:
    """Return batches; each is followed by an update, which adds 1 to the weight."""
    collected = []
    for _ in range(batches):
        collected.append(collector.next().clone())
        with torch.no_grad():
            pool.policy.weight += 1
        pool.update()
        collector.update_policy_weights_()
    return torch.cat(collected, 1)


def start(
    kind: Any, sample: Sample = "win_rate", **options: Any
) -> tuple[Any, PolicyPool]:
    net = Shift()
    pool = PolicyPool(net, size=3, sample=sample)
    keywords = {
        "frames_per_batch": 80,
        "seed": 5,
        "track_policy_version": True,
    } | options
    policies = {"main": net, "past": pool}
    return kind(
        [CountingEnv] * 4, policies=policies, assign=against_the_past, **keywords
    ), pool


def run(kind: Any, sample: Sample, **options: Any) -> tuple[TensorDict, Any, Any]:
    """Return the data of a resumed run, the results of the pool, and data of a reset.

    The uninterrupted run has the same data and results.
    """
    collector, pool = start(kind, sample, **options)
    with collector:
        train(collector, pool, 3)
        state = copy.deepcopy(collector.state_dict())
        expected, results = train(collector, pool, 3), pool.state_dict()
    assert pool.games.sum() > 0
    resumed, pool = start(kind, sample, **options)
    with resumed:
        resumed.load_state_dict(state)
        assert (train(resumed, pool, 3) == expected).all()
        torch.testing.assert_close(pool.state_dict(), results)
        resumed.reset()
        return expected, results, train(resumed, pool, 1)


@pytest.mark.parametrize(
    ("sample", "workers"), [("uniform", [2]), ("latest", [2]), ("win_rate", [1, 4])]
)
def test_data_and_results_do_not_depend_on_the_number_of_workers(
    sample: Sample, workers: list[int]
) -> None:
    """Also in a resumed run, and after a reset, which samples the newest versions."""
    expected, results, after_reset = run(Collector, sample)
    assert sample != "win_rate" or 3 in after_reset["hunter", "policy_id"][:, 0]
    for number in workers:
        others = run(MultiSyncCollector, sample, num_workers=number)
        assert (others[0] == expected).all()
        torch.testing.assert_close(others[1], results)
        assert (others[2] == after_reset).all()


def test_a_resumed_asynchronous_run_has_the_same_pool() -> None:
    run(MultiAsyncCollector, "win_rate", num_workers=1, max_staleness=0)


def test_the_policy_wins_if_its_agents_have_more_and_draws_if_as_much() -> None:
    collector, pool = start(Collector)
    with collector:
        ids = {"hunter": (0, 2), "prey": (2, 2, 2)}
        collector.policy.played(ids, {"hunter": (2.0, 1.0), "prey": (1.0, 1.0, 3.0)})
        collector.policy.played(ids, {"hunter": (1.0, 2.0), "prey": (1.0, 1.0, 3.0)})
        collector.policy.played(ids, {"hunter": (1.5, 1.0), "prey": (1.0, 1.0, 3.0)})
        assert pool.games.tolist() == [0, 3, 0]
        assert pool.wins.tolist() == [0, 1.5, 0]


def test_games_are_no_training_that_workers_have_not_got() -> None:
    collector, pool = start(MultiSyncCollector)
    with collector:
        for _ in range(5):
            collector.next()  # A warning would be an error.
        assert pool.games.sum() > 0
        with torch.no_grad():
            pool.policy.weight += 1
        collector.next()
        with pytest.warns(UserWarning, match="have changed, but the workers"):
            collector.next()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("sample", ["win_rate", "uniform"])
def test_games_that_cannot_be_counted_are_a_warning(kind: Any, sample: Any) -> None:
    pool = PolicyPool(Shift(), size=2, sample=sample)  # The learner is another module.
    policies = {"main": Shift(), "past": pool}
    with (
        kind(
            [CountingEnv] * 2,
            policies=policies,
            assign=against_the_past,
            frames_per_batch=80,
        ) as collector,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        collector.next()
    assert pool.games.sum() == 0
    texts = {str(warning.message) for warning in warned}
    assert len(texts) == (sample == "win_rate")
    assert all("versions of 'past' are not counted" in text for text in texts)


def test_no_other_policy_has_the_name_of_a_place() -> None:
    net = Shift()
    policies = {"past": PolicyPool(net), "past_1": net}
    with pytest.raises(ValueError, match="no other policy can have such a name"):
        Collector(
            CountingEnv, policies=policies, assign=against_the_past, frames_per_batch=9
        )


def test_an_evaluator_plays_against_the_versions_of_now() -> None:
    net = Shift()
    pool = PolicyPool(net, size=2, sample="latest")
    options: dict[str, Any] = {"assign": against_the_past}
    options["policies"] = {"main": net, "past": pool}
    with Evaluator(None, CountingEnv, num_workers=2, **options) as evaluator:
        for index in (0, 1):
            evaluation = evaluator.evaluate(episodes=6)
            ids = {
                i
                for e in evaluation.episodes
                for indices in e.policy_ids.values()
                for i in indices
            }
            assert ids == {0, 1 + index}
            pool.update()
    # Evaluations are no training: they do not count.
    assert pool.games.sum() == 0
