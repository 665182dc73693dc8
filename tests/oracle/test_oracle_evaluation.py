"""Every episode that ``evaluate`` plays, compared with the reference."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_policies import KINDS
from oracle_reference import Ended, ReferenceWorker
from oracle_seeds import episode_seed
from oracle_strategies import budget, repeating_worlds, suitable_in_workers
from oracle_worlds import Group, World, curriculum
from tensordict.nn import InteractionType, set_interaction_type

from marl_collect import evaluate

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]
DETERMINISTIC = InteractionType.DETERMINISTIC


def first_episodes(seed: int, episode: int, level: int) -> dict[str, int]:
    assert episode == 0  # Whichever worker plays it, and also beyond the given seeds.
    return curriculum(seed, episode, level)


def play(
    world: World, policy: Any, name: str, seed: int, explore: Any, options: Any
) -> tuple[Ended, Any]:
    """Play the episode of a seed; return also who acted, by group."""
    kind = KINDS[name]
    worker = ReferenceWorker(
        world,
        None if name.startswith("random") else policy,
        [0],
        seed,
        limit=options.get("max_frames_per_traj"),
        reads_init=kind.reads_init,
        lingers=kind.lingers,
        given=True,
    )
    worker.level = options.get("level")
    with torch.no_grad(), set_interaction_type(explore):
        while not worker.ended:
            worker.frames(random=False)
    return worker.ended[0], worker.chosen[0]


def compare(
    world: World, name: str, seeds: Any, each: int, explore: Any, **options: Any
) -> None:
    """Evaluate a kind of policy, and compare every episode."""
    count = options["episodes"]
    chosen = seeds
    if isinstance(seeds, int):
        chosen = [episode_seed(seeds, 0, number) for number in range(count)]
    policy = KINDS[name].build(world)
    pristine = copy.deepcopy(policy)
    evaluation = evaluate(
        policy,
        world.factory(each),
        seeds=seeds,
        envs_per_worker=1 if world.batched else each,
        deterministic=explore == DETERMINISTIC,
        **options,
    )
    for number, (seed, actual) in enumerate(
        zip(chosen, evaluation.episodes, strict=True)
    ):
        expected, who = play(world, pristine, name, seed, explore, options)
        assert (actual.environment, actual.length) == (number, expected.length)
        for group, names in world.group_map.items():
            returns: Any = tuple(expected.returns[name] for name in names)
            if not KINDS[name].exact:  # Products of more rows have other last bits.
                returns = pytest.approx(returns, rel=1e-4)
            assert actual.returns[group] == returns
            assert list(actual.policy_ids.get(group, ())) == who.get(group, [])


@budget(25)
@given(st.data())
def test_episodes_are_those_of_their_seeds(data: st.DataObject) -> None:
    draw = data.draw
    world = draw(repeating_worlds())
    # Random actions show that the noise follows from the seed of the episode.
    name = draw(st.just("random") | st.sampled_from(suitable_in_workers(world)))
    count, each = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    seeds: Any = draw(
        st.integers(0, 3)
        | st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count)
    )
    limit = draw(st.none() | st.integers(1, 6))
    options: Any = {"num_workers": draw(st.integers(1, 2))}
    options |= {"max_frames_per_traj": limit}

    if draw(st.booleans()):
        options |= {"curriculum": first_episodes, "level": draw(st.integers(0, 2))}
    compare(world, name, seeds, each, DETERMINISTIC, episodes=count, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_are_those_of_first_episodes(workers: int) -> None:
    options: Any = {"curriculum": first_episodes, "level": 2, "num_workers": workers}
    world = World(length=2, fixed=True)
    compare(world, "random", 1, 2, DETERMINISTIC, episodes=5, **options)


SAMPLED = "shared", "recurrent", "assigned_networks", "assigned_pool"


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("workers", [1, 2])
def test_noise_of_networks_is_that_of_the_seed(workers: int, name: str) -> None:
    groups = Group(mask="observation"), Group("b", action="box")
    options = {"episodes": 5, "num_workers": workers}
    seeds, explore = [9, 8, 7, 6, 5], InteractionType.RANDOM
    compare(World(groups=groups, deaths=4), name, seeds, 2, explore, **options)
