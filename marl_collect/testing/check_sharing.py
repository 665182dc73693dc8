"""Finds out whether two environments of one process change each other's episodes."""

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.core.sharing import attributes, simulators
from marl_collect.testing.check_play import Play, Snapshot, differences

_Env = MultiAgentEnv | EnvWrapper
_Episodes = dict[int, list[Snapshot]]

_OTHERS = ("builtins", "gymnasium", "marl_collect", "numpy", "pettingzoo", "torch")
"""Libraries whose classes and modules hold no state of environments."""
_MUTABLE = (bytearray, dict, list, np.ndarray, np.random.Generator, random.Random, set)
_CODE = (type, ModuleType, FunctionType, property, classmethod, staticmethod)
_WATCHED = 10
"""Frames in which the contents of classes and modules are compared."""
ELSEWHERE = (
    "Look for state outside of the object: lists and dicts in the body of a class, "
    "globals of a module, results of lru_cache, files, and libraries with a single "
    "world."
)


class _Generator(NamedTuple):
    """A global generator of random numbers."""

    name: str
    draw: Callable[[], object]
    state: Callable[[], Any]
    restore: Callable[[Any], None]


def _generators() -> list[_Generator]:
    import torch

    return [
        _Generator(
            "NumPy's global generator (np.random)",
            np.random.random,
            np.random.get_state,
            np.random.set_state,
        ),
        _Generator(
            "Python's global generator (random)",
            random.random,
            random.getstate,
            random.setstate,
        ),
        _Generator(
            "torch's global generator",
            lambda: torch.rand(1),
            torch.get_rng_state,
            torch.set_rng_state,
        ),
    ]


def beside(
    pair: tuple[_Env, _Env],
    plays: tuple[Play, Play],
    seeds: Sequence[int],
    runs: Sequence[list[Snapshot]],
) -> Iterator[str]:
    """Play two environments in turn, and compare with the same episodes played alone.

    Args:
        pair: the environments.
        plays: that play them.
        seeds: of the episodes of the first one. The second begins with the last.
        runs: the data of these episodes, if nothing else is played meanwhile.
    """
    others = [*seeds[-1:], *seeds[:-1]] if len(seeds) > 1 else [seeds[0] + 1]
    mixed: tuple[_Episodes, _Episodes] = ({}, {})
    with _undisturbed():
        streams = (_frames(plays[0], seeds), _frames(plays[1], others))
        for frames in zip_longest(*streams):
            for episodes, frame in zip(mixed, frames, strict=True):
                if frame is not None:
                    episodes.setdefault(frame[0], []).append(frame[1])
    for episodes in mixed:
        for seed, run in zip(seeds, runs, strict=True):
            problems = list(differences(run, episodes.get(seed, run)))
            if problems:
                causes = _causes(pair, plays, seeds[0], runs[0])
                yield (
                    "Two environments of one process change each other's episodes: "
                    f"seed {seed} played step by step in turn with another episode, "
                    f"{'; '.join(problems)}. {' '.join(causes)}"
                )
                return


def _frames(play: Play, seeds: Sequence[int]) -> Iterator[tuple[int, Snapshot]]:
    for seed in seeds:
        for frame in play.frames(seed):
            yield seed, frame


def _causes(
    pair: tuple[_Env, _Env],
    plays: tuple[Play, Play],
    seed: int,
    run: list[Snapshot],
) -> Iterator[str]:
    """Yield what the environments share, as far as it can be found."""
    shares = False
    for generator in _generators():
        with _undisturbed():
            drawn = [(frame, generator.draw())[0] for frame in plays[0].frames(seed)]
        if list(differences(run, drawn)):
            shares = True
            yield (
                f"They draw from {generator.name}: build a generator in reset(seed), "
                "such as `self.random = np.random.default_rng(seed)`."
            )
    names = [*_in_both(pair), *_changing(pair[0], plays[0], seed)]
    if names:
        shares = True
        yield f"They share what changes in an episode: {', '.join(names)}."
    if not shares:
        yield ELSEWHERE


def _in_both(pair: tuple[_Env, _Env]) -> Iterator[str]:
    """Yield the attributes that are one mutable object in both environments."""
    for one, two in zip(*map(simulators, pair), strict=False):
        theirs = {id(value) for value in attributes(two).values()}
        for name, value in attributes(one).items():
            known = type(value).__module__.partition(".")[0] in _OTHERS
            mutable = isinstance(value, _MUTABLE) or not known
            if id(value) in theirs and mutable and not isinstance(value, _CODE):
                yield f"the attribute {type(one).__name__}.{name}"


def _changing(env: _Env, play: Play, seed: int) -> list[str]:
    """Return class attributes and module globals that an episode changes."""
    holders = _holders(env)
    before = _contents(holders)
    names: set[str] = set()
    with _undisturbed():
        for _frame in islice(play.frames(seed), _WATCHED):
            after = _contents(holders)
            names |= {name for name in after if before.get(name) != after[name]}
            before = after
    return sorted(names)


def _holders(env: _Env) -> dict[str, Any]:
    """Return the classes of the simulators, of what they hold, and their modules."""
    held = [
        v for inner in simulators(env) for v in (inner, *attributes(inner).values())
    ]
    classes = {kind for value in held for kind in type(value).__mro__}
    holders: dict[str, Any] = {}
    for kind in classes:
        if kind.__module__.partition(".")[0] in _OTHERS:
            continue
        holders[f"the class attribute {kind.__name__}."] = kind
        module = sys.modules.get(kind.__module__)
        if module is not None:
            holders[f"the global {module.__name__}."] = module
    return dict(sorted(holders.items()))


def _contents(holders: dict[str, Any]) -> dict[str, object]:
    """Return the contents of attributes, by name, in a form that can be compared."""
    contents: dict[str, object] = {}
    for prefix, holder in holders.items():
        for name, value in list(vars(holder).items()):
            if hasattr(value, "cache_info"):
                contents[prefix + name] = value.cache_info()
            elif not name.startswith("__") and not isinstance(value, _CODE):
                try:
                    contents[prefix + name] = pickle.dumps(value)
                except Exception:  # noqa: BLE001 - anything may refuse to be pickled
                    continue
    return contents


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the global generators afterwards."""
    states = [(generator, generator.state()) for generator in _generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.restore(state)
