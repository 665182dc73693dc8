"""CountingEnv and its faults behave as documented."""

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.core.description import allocate


def play(seed: int, actions_seed: int = 0, **options: Any) -> list[dict[Any, Any]]:
    env = CountingEnv(**options)
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(seed)
    history = [{key: array.copy() for key, array in row.items()}]
    random = np.random.default_rng(actions_seed)
    while not row["done",][0]:
        row["hunter", "action"][...] = random.integers(0, 4, 2)
        row["prey", "action"][...] = random.uniform(-1, 1, (3, 2))
        env.step_row()
        history.append({key: array.copy() for key, array in row.items()})
    return history


def equal(frames: list[dict[Any, Any]], other_frames: list[dict[Any, Any]]) -> bool:
    return len(frames) == len(other_frames) and all(
        np.array_equal(a[key], b[key])
        for a, b in zip(frames, other_frames, strict=True)
        for key in a
    )


def test_an_episode_depends_only_on_its_seed_and_actions() -> None:
    assert equal(play(3), play(3))
    assert not equal(play(3), play(14))  # The same length, but another seed.
    assert not equal(play(3), play(3, actions_seed=1))


def test_lengths_depend_on_the_seed() -> None:
    lengths = {len(play(seed, deaths=False)) - 1 for seed in range(11)}
    assert lengths == set(range(5, 16))


def test_observations_and_rewards_can_be_recomputed() -> None:
    history = play(4, deaths=False)
    numbers = (4 + 37 * np.arange(2)) % 1009
    for before, after in pairwise(history):
        digits = after["hunter", "action"]
        numbers = (numbers * 31 + digits + 1) % 1009
        observed = after["hunter", "observation"]
        assert observed[:, 0] == pytest.approx(numbers / 1009)
        assert (after["hunter", "reward"][:, 0] == numbers % 7 - 3).all()
        assert (observed[:, 1] == before["hunter", "observation"][:, 1] + 1).all()


def test_agents_die_in_some_episode_before_its_end() -> None:
    deaths = [
        frame["prey", "terminated"].any() and not frame["done",][0]
        for seed in range(20)
        for frame in play(seed, min_length=15)
    ]
    assert any(deaths)


@pytest.mark.parametrize("phase", ["create", "reset", "step", "close"])
def test_a_fault_occurs_in_its_phase(phase: Any) -> None:
    def run() -> None:
        env = CountingEnv(fault=Fault("raise", phase))
        env.bind(allocate(env.description.row()))
        env.reset_row(0)
        env.step_row()
        env.close()

    with pytest.raises(CountingError, match=phase):
        run()


def test_a_fault_occurs_once_after_the_calls_that_succeed() -> None:
    env = CountingEnv(fault=Fault("raise", "reset", at=1))
    env.bind(allocate(env.description.row()))
    env.reset_row(0)
    with pytest.raises(CountingError):
        env.reset_row(1)
    env.reset_row(2)


def test_the_environment_continues_after_a_sleep_fault() -> None:
    env = CountingEnv(fault=Fault("sleep", "reset", seconds=0.2))
    env.bind(allocate(env.description.row()))
    begin = time.perf_counter()
    env.reset_row(0)
    assert time.perf_counter() - begin >= 0.2
