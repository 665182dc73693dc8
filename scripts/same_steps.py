"""Compares two implementations of a PettingZoo environment, bit by bit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tally = Counter[str]
"""Counts of ``steps`` compared, ``episodes`` that ended, ``deaths`` (agents that ended
before others), ``terminations`` and ``truncations`` of agents."""


def compare(
    expected: Any,
    actual: Any,
    spaces: Mapping[Any, Any],
    *,
    steps: int,
    seed: int,
    with_state: bool,
) -> Tally:
    """Step both with the same random actions and compare everything that they return.

    Args:
        expected: the reference, a ``ParallelEnv`` of PettingZoo or an object with its
            methods; its values determine dtypes.
        actual: the environment to compare with it.
        spaces: action space of each possible agent.
        steps: number of steps.
        seed: of resets and actions.
        with_state: whether to compare ``state()`` too.

    Raises:
        AssertionError: if they differ; names seed, step, agent and both values.
    """
    tally = Tally(steps=0, episodes=0, deaths=0, terminations=0, truncations=0)
    for index, space in enumerate(spaces.values()):
        space.seed(seed * 1000 + index)
    episode_seed = seed
    _same("reset", expected.reset(seed=seed), actual.reset(seed=seed))
    for step in range(steps):
        location = f"seed {seed}, step {step}"
        if not expected.agents:
            tally["episodes"] += 1
            episode_seed += 1
            resets = expected.reset(seed=episode_seed), actual.reset(seed=episode_seed)
            _same(f"{location}, reset", *resets)
        _equal(f"{location}, agents", list(expected.agents), list(actual.agents))
        actions = {agent: spaces[agent].sample() for agent in expected.agents}
        # An environment may keep or modify its actions, so each gets a copy.
        copies = {agent: np.copy(action)[()] for agent, action in actions.items()}
        expected_result, actual_result = expected.step(actions), actual.step(copies)
        _same(location, expected_result, actual_result)
        if with_state:
            _identical(f"{location}, state", expected.state(), actual.state())
        tally["steps"] += 1
        _count(tally, expected_result, expected.agents)
    return tally


def _count(
    tally: Tally, result: Sequence[dict[Any, Any]], agents_left: list[Any]
) -> None:
    terminations, truncations = result[2], result[3]
    ended_agents = [a for a in terminations if terminations[a] or truncations.get(a)]
    tally["terminations"] += sum(bool(flag) for flag in terminations.values())
    tally["truncations"] += sum(bool(flag) for flag in truncations.values())
    tally["deaths"] += len(ended_agents) if agents_left else 0


def _same(
    location: str, expected_result: Sequence[Any], actual_result: Sequence[Any]
) -> None:
    names = ["observation", "reward", "termination", "truncation", "info"]
    if len(expected_result) == 2:
        names = ["observation", "info"]
    for name, expected, actual in zip(
        names, expected_result, actual_result, strict=True
    ):
        for agent in expected:
            if agent not in actual:
                raise AssertionError(f"{location}: no {name} of {agent}")
            _identical(f"{location}, {name} of {agent}", expected[agent], actual[agent])


def _identical(location: str, expected: Any, actual: Any) -> None:
    """Compare bits, after casting to the reference's dtype as a row does."""
    if isinstance(expected, Mapping):
        _equal(location, list(expected), list(actual))
        for key in expected:
            _identical(f"{location}/{key}", expected[key], actual[key])
        return
    expected_array = np.asarray(expected)
    actual_array = np.asarray(actual)
    if (
        expected_array.shape != actual_array.shape
        or expected_array.tobytes()
        != actual_array.astype(expected_array.dtype).tobytes()
    ):
        raise AssertionError(f"{location}: expected {expected!r}, found {actual!r}")


def _equal(location: str, expected: Any, actual: Any) -> None:
    if expected != actual:
        raise AssertionError(f"{location}: expected {expected}, found {actual}")
