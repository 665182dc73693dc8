"""Compares two implementations of a PettingZoo environment, bit by bit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tally = Counter[str]
"""Counts of ``steps`` compared, ``episodes`` that ended, ``deaths`` (agents that ended
before others), ``terminations`` and ``truncations`` of agents."""


def compare(
    expected: Any, actual: Any, spaces: Mapping[Any, Any], *, steps: int, seed: int
) -> Tally:
    """Step both with the same random actions and compare everything that they return.

    Args:
        expected: the reference, a ``ParallelEnv`` of PettingZoo or an object with its
            methods; its values determine dtypes.
        actual: the environment to compare with it.
        spaces: action space of each possible agent.
        steps: number of steps.
        seed: of resets and actions.

    Raises:
        AssertionError: if they differ; names seed, step, agent and both values.
    """
    tally = Tally(steps=0, episodes=0, deaths=0, terminations=0, truncations=0)
    for index, space in enumerate(spaces.values()):
        space.seed(seed * 1000 + index)
    for step in range(steps):
        location = f"seed {seed}, step {step}"
        if step == 0 or not expected.agents:
            tally["episodes"] += step > 0
            episode_seed = seed + tally["episodes"]
            resets = (env.reset(seed=episode_seed) for env in (expected, actual))
            _same(f"{location}, reset", ("observation", "info"), *resets)
        _equal(f"{location}, agents", list(expected.agents), list(actual.agents))
        actions = {agent: spaces[agent].sample() for agent in expected.agents}
        # An environment may keep or modify its actions, so each gets a copy.
        copies = {agent: np.copy(action)[()] for agent, action in actions.items()}
        result = expected.step(actions)
        names = ("observation", "reward", "termination", "truncation", "info")
        _same(location, names, result, actual.step(copies))
        terminations, truncations = result[2], result[3]
        ended = [a for a in terminations if terminations[a] or truncations.get(a)]
        tally["steps"] += 1
        tally["terminations"] += sum(bool(flag) for flag in terminations.values())
        tally["truncations"] += sum(bool(flag) for flag in truncations.values())
        tally["deaths"] += len(ended) if expected.agents else 0
    return tally


def _same(location: str, names: Sequence[str], *results: Sequence[Any]) -> None:
    """Compare the dicts that both returned, by name and agent."""
    for name, expected, actual in zip(names, *results, strict=True):
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
    array, other_array = np.asarray(expected), np.asarray(actual)
    _equal(location, array.shape, other_array.shape)
    if array.tobytes() != other_array.astype(array.dtype).tobytes():
        raise AssertionError(f"{location}: expected {expected!r}, found {actual!r}")


def _equal(location: str, expected: Any, actual: Any) -> None:
    if expected != actual:
        raise AssertionError(f"{location}: expected {expected}, found {actual}")
