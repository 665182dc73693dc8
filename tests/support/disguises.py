"""PettingZoo environments in disguise: the same data in other orders, types, memory."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from pettingzoo import ParallelEnv
from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper

from support.zoo import altered

Kinds = list[Callable[[Any], Any]]

LISTS: Kinds = [
    *(list, tuple, deque, np.array),
    lambda names: dict.fromkeys(names).keys(),
    *[lambda names: names] * 2,
]
REWARDS: Kinds = [float, int, np.float64, np.float16, np.int8, np.array]
FLAGS: Kinds = [bool, np.bool_, int, np.array]
VECTORS: Kinds = [
    *(np.copy, list, tuple, np.float64, torch.tensor),
    lambda vector: (np.float64(vector[0]), *vector[1:]),
]


class Disguise:
    """Draws how an environment returns what it returns.

    It keeps its arrays, and changes them when it returns others. It may also return
    the results of agents that have ended.
    """

    def __init__(self, raw: Any, seed: int) -> None:
        self.raw, self.random = raw, random.Random(seed)
        self.agents = self.random.choice(LISTS)
        self.listed: list[Any] = []
        self.repeats = self.random.random() < 0.3
        self.memory: dict[Any, Any] = {}
        self.last: dict[Any, list[Any]] = {}

    def one_of(self, kinds: Kinds) -> Callable[[Any], Any]:
        return self.random.choice(kinds)

    def shuffled(self, named: Mapping[Any, Any]) -> dict[Any, Any]:
        names = self.random.sample([*named], len(named))
        return {name: named[name] for name in names}

    def observation(self, observed: Any, agent: Any = None) -> Any:
        """Return an observation, often in memory that the next one gets too."""
        if isinstance(observed, Mapping):
            return {
                name: self.observation(part, (agent, name))
                for name, part in self.shuffled(observed).items()
            }
        if isinstance(observed, tuple):
            entries = enumerate(observed)
            return tuple(self.observation(part, (agent, k)) for k, part in entries)
        array = np.asarray(observed)
        if array.dtype == np.float32 and array.size and self.random.random() < 0.4:
            return self.one_of(VECTORS)(array)
        memory = self.memory.setdefault(agent, np.empty_like(array))
        memory.flags.writeable = True
        memory[...] = array
        memory.flags.writeable = False
        return memory

    def infos(self, infos: Mapping[Any, Any]) -> dict[Any, Any]:
        strangers = {"count": 3, "speeds": np.ones(2), "all": {}}
        known = {
            agent: self.shuffled(info) if info else self.random.choice([None, {}])
            for agent, info in infos.items()
            if agent not in strangers
        }
        return defaultdict(dict, self.shuffled(known | strangers))

    def keep_list(self) -> None:
        """Have one list of agents, which changes."""
        self.listed[:] = self.raw.agents
        self.raw.agents = self.listed

    def reset(self, results: Any) -> Any:
        self.last.clear()
        self.keep_list()
        observed = {a: self.observation(o, a) for a, o in results[0].items()}
        return self.shuffled(observed), self.infos(results[1])

    def step(self, results: Any) -> Any:
        self.keep_list()
        observed, rewards, terminated, truncated, infos = map(dict, results)
        for agent, (observation, *ends) in self.last.items():
            if agent not in observed and any(ends):
                observed[agent], rewards[agent] = observation, 5.0
                terminated[agent], truncated[agent] = ends
        for agent in observed if self.repeats else ():
            ends = [terminated[agent], truncated[agent]]
            self.last[agent] = [observed[agent], *ends]
        flags = [
            {agent: self.one_of(FLAGS)(flag) for agent, flag in flagged.items()}
            for flagged in (terminated, truncated)
        ]
        return (
            self.shuffled({a: self.observation(o, a) for a, o in observed.items()}),
            self.shuffled({a: self.one_of(REWARDS)(r) for a, r in rewards.items()}),
            *map(self.shuffled, flags),
            self.infos(infos),
        )

    def turn(self, _: Any = None) -> None:
        """Change what an environment of turns has said after a call."""
        self.raw.rewards = self.shuffled(self.raw.rewards)
        self.raw.infos = dict(self.infos(self.raw.infos))


class _Contained:
    """Mixed into PettingZoo's wrappers: agents are in another container than a list."""

    def __init__(self, raw: Any, container: Callable[[Any], Any]) -> None:
        super().__init__(raw)  # type: ignore[call-arg]
        self.container = container

    @property
    def possible_agents(self) -> Any:
        return self.container(self.env.possible_agents)  # type: ignore[attr-defined]

    @property
    def agents(self) -> Any:
        return self.container(self.env.agents)  # type: ignore[attr-defined]


class _ContainedParallel(_Contained, BaseParallelWrapper):
    pass


class _ContainedTurns(_Contained, BaseWrapper):
    pass


def contained(raw: Any, container: Callable[[Any], Any]) -> Any:
    """Return ``raw`` with its agents in ``container``."""
    together = isinstance(raw, ParallelEnv)
    return (_ContainedParallel if together else _ContainedTurns)(raw, container)


def disguised(raw: Any, seed: int) -> Any:
    """Return ``raw``, which returns everything in the disguise of a seed."""
    disguise = Disguise(raw, seed)
    if isinstance(raw, ParallelEnv):
        altered(raw, reset=disguise.reset, step=disguise.step)
    else:
        seen = disguise.observation
        altered(raw, reset=disguise.turn, step=disguise.turn, observe=seen)
    return contained(raw, disguise.agents)
