"""Past versions as opponents: all collectors sample, publish and resume them alike."""

import copy
from typing import Any

import pytest
import torch
from collector_tools import same
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Evaluator, PolicyPool, evaluate
from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.models import make_policy
from marl_collect.policies.pool import Keep, Sample

ENVIRONMENTS = 4
MAIN, PAST = 0, (1, 2, 3)
Agents = tuple[str, ...]


def half(seed: int, agents: Agents) -> dict[str, str]:
    """Give every second agent the learner; which one depends on the seed."""
    return {a: "past" if (seed + i) % 2 else "main" for i, a in enumerate(agents)}


def population(keep: Keep = "recent", sample: Sample = "win_rate") -> dict[str, Any]:
    torch.manual_seed(0)
    net = make_policy(CountingEnv(), num_cells=(8,))
    return {"main": net, "past": PolicyPool(net, size=3, keep=keep, sample=sample)}


def start(kind: Any = Collector, **options: Any) -> Any:
    keywords = {"policies": population(), "assign": half, "seed": 3} | options
    keywords = {"frames_per_batch": 15 * ENVIRONMENTS} | keywords
    return kind([CountingEnv] * ENVIRONMENTS, **keywords)


def train(collector: Any) -> None:
    """Change the learner, keep its version, and publish both."""
    with torch.no_grad():
        for weight in collector.policy["main"].parameters():
            weight.mul_(-1.1)
    collector.policy["past"].update()
    collector.update_policy_weights_()


def batches(collector: Any, count: int) -> TensorDict:
    collected = []
    for _ in range(count):
        collected.append(collector.next().clone())
        train(collector)
    return torch.cat(collected, 1)


@pytest.mark.parametrize("sample", ["uniform", "latest", "win_rate"])
def test_data_do_not_depend_on_the_number_of_workers(sample: Sample) -> None:
    def run(kind: Any, **options: Any) -> tuple[TensorDict, dict[str, Any]]:
        policies = population(sample=sample)
        with start(kind, policies=policies, **options) as collector:
            frames = batches(collector, 6)
        return frames, policies["past"].state_dict()

    expected, pool = run(Collector)
    ids = set(torch.cat([expected[g, "policy_id"].flatten() for g in GROUPS]).tolist())
    assert ids == {MAIN, *PAST}
    assert pool["games"].sum() > 0
    for workers in (1, 4) if sample == "win_rate" else (2,):
        actual, other = run(MultiSyncCollector, num_workers=workers)
        same(actual, expected, 1e-4)
        torch.testing.assert_close(other, pool)


GROUPS = ("hunter", "prey")
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Collector, {}),
    (MultiSyncCollector, {"num_workers": 2}),
    (MultiAsyncCollector, {"num_workers": 1, "max_staleness": 0}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(kind: Any, options: Any) -> None:
    with start(kind, **options) as uninterrupted:
        batches(uninterrupted, 3)
        state = copy.deepcopy(uninterrupted.state_dict())
        expected = batches(uninterrupted, 3)
        pool = uninterrupted.policy["past"].state_dict()
    with start(kind, **options) as resumed:
        resumed.load_state_dict(state)
        same(batches(resumed, 3), expected, 1e-4)
        torch.testing.assert_close(resumed.policy["past"].state_dict(), pool)


def test_async_workers_act_with_members_of_the_pool() -> None:
    policies = population()
    games = []
    with start(MultiAsyncCollector, policies=policies, num_workers=2) as collector:
        for _ in range(8):
            batch = collector.next().clone()
            games.append(float(policies["past"].games.sum()))
            ids = batch["hunter", "policy_id"]
            assert set(ids.unique().tolist()) <= {MAIN, *PAST}
            assert (ids == MAIN).any()
            train(collector)
    assert policies["past"].versions.tolist() == [6, 7, 8]
    # Later, workers that lag may have met only versions that were replaced.
    assert games[0] > 0


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_version_acts_with_the_weights_that_it_had(kind: Any) -> None:
    policies = population(sample="latest")
    with start(kind, policies=policies, num_workers=1) as collector:
        for number in range(4):
            with torch.no_grad():
                for weight in policies["main"].parameters():
                    weight.fill_(number)
            policies["past"].update()
            collector.update_policy_weights_()
        # Episodes that began earlier keep their version.
        for _ in range(3):
            batch = collector.next()
        logits = batch["hunter", "logits"]
        ids = batch["hunter", "policy_id"]
        members = [member["hunter"] for member in policies["past"].members]
        for policy_id, member in zip(PAST, members, strict=True):
            policy_mask = ids == policy_id
            expected = member[0](batch["hunter", "observation"])
            torch.testing.assert_close(logits[policy_mask], expected[policy_mask])
        newest = PAST[int(policies["past"].versions.argmax())]
        assert (ids[:, -1] == newest).any()


def test_evaluations_sample_the_pool() -> None:
    options: dict[str, Any] = {"policies": population(), "assign": half, "episodes": 12}
    seeds = range(12)
    for number in (1, 2):
        with torch.no_grad():
            next(options["policies"]["main"].parameters()).mul_(-number)
        options["policies"]["past"].update()
    serial = evaluate(None, CountingEnv, seeds=seeds, **options)
    parallel = evaluate(None, CountingEnv, seeds=seeds, num_workers=2, **options)
    expected = [options["policies"]["past"].pick(seed) for seed in seeds]
    assert len(set(expected)) == 3
    for evaluation in (serial, parallel):
        for index, episode in zip(expected, evaluation.episodes, strict=True):
            assert set(episode.policy_ids["prey"]) == {MAIN, PAST[index]}
    assert [e.returns for e in serial.episodes] == [
        e.returns for e in parallel.episodes
    ]
    # An evaluation does not count as games of the pool.
    assert options["policies"]["past"].games.sum() == 0


def test_an_evaluator_plays_with_the_present_pool() -> None:
    policies = population(sample="latest")
    with Evaluator(
        None, CountingEnv, policies=policies, assign=half, seeds=1
    ) as evaluator:
        first = evaluator.evaluate(episodes=4)
        with torch.no_grad():
            next(policies["main"].parameters()).mul_(-1)
        policies["past"].update()
        second = evaluator.evaluate(episodes=4)
    for evaluation, policy_id in ((first, PAST[0]), (second, PAST[1])):
        for episode in evaluation.episodes:
            assert set(episode.policy_ids["prey"]) == {MAIN, policy_id}
