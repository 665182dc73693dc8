"""Scripted PettingZoo environments in which every number follows from seed and actions.

Each agent has an integer that is mixed, in every step, with all actions. Observations,
rewards, masks, deaths, joins and the end of the episode follow from these integers. So
a wrong action, a wrong seed or a stale observation changes everything that comes later.

All numbers are multiples of 1/1024 below 1024: sums and products of few of them are
exact in float32, whatever the order.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

from marl_collect import BatchedEnv, Step
from marl_collect.envs import FrameStack, PettingZooWrapper
from marl_collect.envs.pettingzoo.description import Absent

PRIME = 1009
FEATURES = 4
"""Length of the vector of numbers that every agent observes."""
CHOICES = 3
"""Number of actions of a Discrete space."""


def mix(*numbers: int) -> int:
    """Return a number in ``[0, 1009)`` that depends on all of ``numbers``."""
    total = 17
    for number in numbers:
        total = (total * 31 + int(number) + 7) % PRIME
    return total


def curriculum(seed: int, episode: int, level: int) -> dict[str, int]:
    """Return a task in which nothing is left out."""
    return {"seed": seed, "episode": episode, "level": level}


class Plain:
    """Has a repr that is code with all values that differ from the defaults."""

    def __repr__(self) -> str:
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            if getattr(self, field.name) != default:
                arguments.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class Group(Plain):
    """One kind of agents.

    Attributes:
        name: prefix of the agents' names.
        n: how many there are.
        observation: ``"flat"`` numbers; ``"nested"`` numbers and an image in Dicts.
        action: ``"discrete"`` (``start`` 2), ``"box"`` or ``"multi"`` (MultiDiscrete).
        mask: where the mask of legal actions is: nowhere, observation or info.
    """

    name: str = "a"
    n: int = 2
    observation: Literal["flat", "nested"] = "flat"
    action: Literal["discrete", "box", "multi"] = "discrete"
    mask: Literal["", "observation", "info"] = ""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The key of the observed numbers."""
        key: tuple[str, ...] = (self.name, "observation")
        if self.mask == "observation":
            key = (*key, "observation")
        return (*key, "numbers") if self.observation == "nested" else key

    @property
    def image(self) -> tuple[str, ...] | None:
        """The key of the observed image, if there is one."""
        if self.observation == "flat":
            return None
        return (*self.numbers[:-1], "deep", "image")

    def observation_space(self) -> spaces.Space[Any]:
        """Return the observation space of one agent."""
        numbers = spaces.Box(-np.inf, np.inf, (FEATURES,), np.float32)
        space: spaces.Space[Any] = numbers
        if self.observation == "nested":
            image = spaces.Box(0, 255, (2, 3), np.uint8)
            space = spaces.Dict(
                {"numbers": numbers, "deep": spaces.Dict({"image": image})}
            )
        if self.mask == "observation":
            mask = spaces.MultiBinary(CHOICES)
            space = spaces.Dict({"observation": space, "action_mask": mask})
        return space

    def action_space(self) -> spaces.Space[Any]:
        """Return the action space of one agent."""
        if self.action == "discrete":
            return spaces.Discrete(CHOICES, start=2)
        if self.action == "multi":
            return spaces.MultiDiscrete([CHOICES, 2])
        return spaces.Box(-1, 1, (2,), np.float32)

    def digest(self, action: Any) -> int:
        """Return an integer that identifies an action."""
        values = np.asarray(action, np.float64).ravel()
        return mix(*np.floor(values * 64).astype(int))


@dataclass(frozen=True, repr=False)
class World(Plain):
    """Specifies an environment. Its repr is the code that creates it.

    Attributes:
        groups: of agents.
        turns: agents take turns (AEC) instead of acting together.
        length: frames of the longest episode.
        fixed: every episode has exactly ``length`` frames.
        deaths: one in so many agents ends in a step; 0: none before the episode does.
        vanish: some agents that end are gone without a flag (parallel only).
        rests: agents are not always listed while they live (parallel only).
        absent: what agents that are not listed are, ``"dead"`` or ``"waiting"``.
        joins: agents but the first of each group may join late.
        respawns: agents that ended come back after some steps (parallel only).
        chatty: tell of agents that do not take part, too (parallel only).
        repeats: False draws from numpy's global generator in each step; needs
            ``state``, which shows what was drawn.
        told: whether the wrapper is told so.
        crash: a file at which a process ends that finds it; it removes it before.
        state: write ``"state"``.
        info: write ``(g, "info", "luck")``.
        batched: many worlds are stepped in one call, by a simulator; agents act
            together, and do not vanish, rest, join or come back.
        stack: observations in a stack of ``FrameStack``; 0: none.
        done_on_any, use_mask, categorical, one_group, agent_ids, episode_reward: the
            wrapper's keywords; ``one_group`` puts all agents into one.
    """

    groups: tuple[Group, ...] = (Group(),)
    turns: bool = False
    length: int = 5
    fixed: bool = False
    deaths: int = 0
    vanish: bool = False
    rests: bool = False
    absent: Absent = "dead"
    joins: bool = False
    respawns: bool = False
    chatty: bool = False
    repeats: bool = True
    told: bool = True
    crash: str = ""
    state: bool = False
    info: bool = False
    batched: bool = False
    stack: int = 0
    done_on_any: bool | None = None
    use_mask: bool = True
    categorical: bool = True
    agent_ids: bool = False
    episode_reward: bool = False
    time_limit: ClassVar[None] = None

    @property
    def agents(self) -> list[str]:
        """Names of all agents."""
        return [f"{g.name}_{i}" for g in self.groups for i in range(g.n)]

    @property
    def group_map(self) -> dict[str, list[str]]:
        """The names by group."""
        return {g.name: [f"{g.name}_{i}" for i in range(g.n)] for g in self.groups}

    def group(self, agent: str) -> Group:
        """Return the group of an agent."""
        return next(g for g in self.groups if agent.startswith(f"{g.name}_"))

    def masked(self, group: Group) -> bool:
        """Whether masks are written; one mask in an info is enough."""
        informed = any(g.mask == "info" for g in self.groups)
        return bool(group.mask) or (informed and group.action == "discrete")

    @property
    def masked_groups(self) -> set[str]:
        """Names of the groups with masks."""
        return {group.name for group in self.groups if self.masked(group)}

    @property
    def infos(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the numbers in infos that are stored."""
        return {"luck": ()} if self.info else {}

    @property
    def any_ends(self) -> bool:
        """Whether the first agent to be done ends the episode."""
        return not self.turns if self.done_on_any is None else self.done_on_any

    def raw(self) -> "Together | InTurn":
        """Build the PettingZoo environment."""
        return InTurn(self) if self.turns else Together(self)

    def build(self) -> Any:
        """Build our environment around it."""
        # Who rests at first has no info in which a mask could be found.
        informed = self.rests and any(group.mask == "info" for group in self.groups)
        env = PettingZooWrapper(
            self.raw(),
            action_mask="info" if informed else "auto",
            group_map=self.group_map,
            return_state=self.state,
            use_mask=self.use_mask,
            categorical_actions=self.categorical,
            done_on_any=self.done_on_any,
            repeats=self.repeats or not self.told,
            agent_ids=self.agent_ids,
            info_keys=self.infos,
            episode_reward=self.episode_reward,
            absent=self.absent,
        )
        return FrameStack(env, self.stack) if self.stack else env

    def build_worlds(self, count: int) -> Any:
        """Build a simulator of many worlds."""
        env = Simulator(self, count)
        return FrameStack(env, self.stack) if self.stack else env

    def factory(self, count: int) -> Any:
        """Return a function that builds the environment, or ``count`` worlds of it."""
        if self.batched:
            return partial(World.build_worlds, self, count)
        return partial(World.build, self)


class _Script:
    """The dynamics, for agents that act together or in turn."""

    metadata = {"name": "scripted", "render_modes": []}
    render_mode = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.drawn: int | None = None
        self.wind = 0
        self.possible_agents = world.agents
        self.agents: list[str] = []
        size = len(world.agents) + 1
        self.state_space = spaces.Box(0, PRIME, (size,), np.float32)
        self._observations = {g.name: g.observation_space() for g in world.groups}
        self._actions = {g.name: g.action_space() for g in world.groups}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observations[self.world.group(agent).name]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._actions[self.world.group(agent).name]

    def blow(self, wind: int) -> None:
        """Change all later steps, and how episodes begin."""
        self.wind = wind

    def begin(self, seed: int, task: Mapping[str, int] | None) -> None:
        world = self.world
        more = (self.wind, *task.values()) if task else (self.wind,) * bool(self.wind)
        self.seed = mix(seed % PRIME, seed // PRIME, *more)
        self.steps = 0
        self.noise = self.draw()
        self.number = {a: mix(self.seed, i) for i, a in enumerate(world.agents)}
        self.digest = dict.fromkeys(world.agents, 0)
        span = world.length if world.fixed else 1 + mix(self.seed, 99) % world.length
        self.end = span
        firsts = {f"{g.name}_0" for g in world.groups}
        self.arrives = {
            a: mix(self.seed, i, 3) % 4 if world.joins and a not in firsts else 0
            for i, a in enumerate(world.agents)
        }
        self.agents = [a for a in world.agents if self.arrives[a] == 0]

    @property
    def alive(self) -> list[str]:
        """The agents that joined and did not end."""
        return self.agents

    def draw(self) -> int:
        """Return a number that no seed determines; 0 if the environment repeats."""
        if self.world.repeats:
            return 0
        if self.drawn is not None:  # The reference uses the recorded number.
            return self.drawn
        return int(np.random.randint(1, PRIME))  # noqa: NPY002 - on purpose

    def advance(self, actions: Mapping[str, Any]) -> dict[str, str]:
        """Apply actions; return the agents that end, and how."""
        world = self.world
        if world.crash:
            with suppress(FileNotFoundError):
                os.unlink(world.crash)
                os._exit(9)
        self.steps += 1
        self.noise = self.draw()
        for agent, action in actions.items():
            self.digest[agent] = world.group(agent).digest(action)
        total = self.wind + sum(self.digest[a] for a in actions)
        for a, number in self.number.items():
            self.number[a] = mix(number, self.digest[a], total, self.noise)
        ends: dict[str, str] = {}
        for agent in self.alive:
            number = self.number[agent]
            if self.steps >= self.end:
                ends[agent] = "truncated" if self.seed % 2 else "terminated"
            elif world.deaths and mix(number, 5) % world.deaths == 0:
                vanishes = world.vanish and mix(number, 8) % 3 == 0
                ends[agent] = (
                    "vanished"
                    if vanishes
                    else "truncated"
                    if mix(number, 6) % 2
                    else "terminated"
                )
        return ends

    def arrivals(self, ends: Mapping[str, str]) -> list[str]:
        """Return the agents that join with the next step."""
        new = []
        for agent in self.world.agents:
            if agent not in self.alive and self.steps < self.end:
                if self.arrives[agent] == self.steps:
                    new.append(agent)
            elif agent in ends and self.world.respawns:
                self.arrives[agent] = self.steps + 1 + mix(self.number[agent], 4) % 3
        return new

    def look(self, agent: str) -> Any:
        group, number = self.world.group(agent), self.number[agent]
        numbers = np.array(
            [number / 1024, self.steps, self.digest[agent] / 1024, self.noise / 1024],
            np.float32,
        )
        observation: Any = numbers
        if group.observation == "nested":
            image = np.arange(6).reshape(2, 3) * 7 + number
            observation = {
                "numbers": numbers,
                "deep": {"image": (image % 256).astype(np.uint8)},
            }
        if group.mask == "observation":
            legal = self.legal(agent).astype(np.int8)
            observation = {"observation": observation, "action_mask": legal}
        return observation

    def legal(self, agent: str) -> Any:
        """Return the mask of legal actions; at least one is legal."""
        number = self.number[agent]
        legal = np.array([number >> i & 1 for i in range(CHOICES)], np.bool_)
        legal[number % CHOICES] = True
        return legal

    def tell(self, agent: str) -> dict[str, Any]:
        info: dict[str, Any] = {}
        if self.world.info and mix(self.number[agent], 9) % 4:
            info["luck"] = mix(self.number[agent], 10) / 8
        # All infos of a reset have a mask, which announces masks.
        tells = self.steps == 0 or mix(self.number[agent], 12) % 5
        if self.world.group(agent).mask == "info" and tells:
            info["action_mask"] = self.legal(agent)
        return info

    def reward(self, agent: str) -> float:
        return mix(self.number[agent], 11) / 16 - 20

    def state(self) -> Any:
        return np.array([self.noise, *self.number.values()], np.float32)

    def render(self) -> None:
        pass

    def close(self) -> None:
        pass


class Together(_Script, ParallelEnv):
    """All agents that are listed act at the same time."""

    @property
    def alive(self) -> list[str]:
        return self.living

    def listed(self) -> list[str]:
        """Return the agents that act next, at least one if any is alive."""
        if not self.world.rests:
            return self.living[:]
        active = [a for a in self.living if mix(self.number[a], 13) % 3]
        return active or self.living[:1]

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.begin(int(seed or 0), options)
        self.living = self.agents
        self.agents = self.listed()
        return (
            {a: self.look(a) for a in self.agents},
            {a: self.tell(a) for a in self.agents},
        )

    def step(self, actions: dict[str, Any]) -> Any:
        if sorted(actions) != sorted(self.agents):
            raise ValueError(f"actions of {list(actions)}, agents are {self.agents}")
        actors, before = self.agents, self.living
        ends = self.advance(actions)
        new = self.arrivals(ends)
        spoken = [a for a in (*actors, *ends) if ends.get(a) != "vanished"]
        self.living = [
            a
            for a in self.possible_agents
            if a in new or (a in before and a not in ends)
        ]
        self.agents = self.listed()
        spoken += [a for a in before if a in self.agents]
        observed = [a for a in self.possible_agents if a in spoken or a in new]
        if self.world.chatty:
            observed = [a for a in self.possible_agents if ends.get(a) != "vanished"]
        return (
            {a: self.look(a) for a in observed},
            {a: self.reward(a) for a in observed},
            {a: ends.get(a) == "terminated" for a in observed},
            {a: ends.get(a) == "truncated" for a in observed},
            {a: self.tell(a) for a in observed},
        )


class InTurn(_Script, AECEnv):
    """One agent acts in each step."""

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.begin(int(seed or 0), options)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {a: self.tell(a) for a in self.agents}
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None

    def observe(self, agent: str) -> Any:
        return self.look(agent)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        ends = self.advance({agent: action})
        self._cumulative_rewards[agent] = 0
        for other in self.arrivals(ends):
            self.agents.append(other)
            self.rewards[other] = self._cumulative_rewards[other] = 0.0
            self.terminations[other] = self.truncations[other] = False
        for other in self.agents:
            self.rewards[other] = self.reward(other)
            self.terminations[other] = ends.get(other) == "terminated"
            self.truncations[other] = ends.get(other) == "truncated"
            self.infos[other] = self.tell(other)
        self._accumulate_rewards()
        start = self.agents.index(agent) + 1
        order = self.agents[start:] + self.agents[:start]
        alive = [a for a in order if a not in ends]
        self.agent_selection = alive[0] if alive else agent
        self._deads_step_first()


GARBAGE = 77.0
"""A value that the simulator gives to agents that are done; nobody may see it."""


class Simulator(BatchedEnv):
    """Steps many worlds in one call."""

    def __init__(self, world: World, count: int) -> None:
        super().__init__(replace(world, stack=0).build().description, count)
        self.world = world
        self.raws = [Together(world) for _ in range(count)]
        self.tasks: list[Any] = [None] * count

    def blow(self, wind: int) -> None:
        for raw in self.raws:
            raw.blow(wind)

    def set_task(self, world: int, task: Any) -> None:
        self.tasks[world] = task

    def begin(self, which: Any, seeds: Any) -> Any:
        for k in range(self.worlds) if which is None else np.flatnonzero(which):
            self.raws[k].reset(int(seeds[k]), self.tasks[k])
        return self._observations()

    def advance(self, actions: Mapping[str, Any]) -> Step:
        results = []
        for k, raw in enumerate(self.raws):
            taken = {
                f"{g.name}_{i}": actions[g.name][k, i] + 2 * (g.action == "discrete")
                for g in self.world.groups
                for i in range(g.n)
            }
            results.append(raw.step({a: taken[a] for a in raw.agents}))
        _, rewards, terminated, truncated, _ = zip(*results, strict=True)
        return Step(
            self._observations(),
            self._by_group(rewards, GARBAGE),
            self._by_group(terminated, False),
            self._by_group(truncated, False),
        )

    def _by_group(self, results: Any, other: Any) -> dict[str, Any]:
        """Return a value of each agent, ``[K, n]``; ``other`` if it has none."""
        return {
            group: np.array([[r.get(name, other) for name in names] for r in results])
            for group, names in self.world.group_map.items()
        }

    def _observations(self) -> dict[Any, Any]:
        """Return everything that the worlds tell, of agents that are done as well."""
        observations: dict[Any, Any] = {}
        for group in self.world.groups:
            names = self.world.group_map[group.name]
            looks = [[raw.look(name) for name in names] for raw in self.raws]
            tells = [[raw.tell(name) for name in names] for raw in self.raws]
            masks = [[tell.get("action_mask", LEGAL) for tell in row] for row in tells]
            stacked = together(looks)
            if group.mask == "observation":
                masks = stacked.pop("action_mask")
            observations[group.name] = stacked
            if self.world.masked(group):
                observations[group.name, "action_mask"] = np.array(masks, np.bool_)
            if self.world.info:
                luck = [[tell.get("luck", 0) for tell in row] for row in tells]
                observations[group.name, "info", "luck"] = np.array(luck, np.float32)
        if self.world.state:
            observations["state"] = np.array([raw.state() for raw in self.raws])
        return observations


LEGAL = np.ones(CHOICES, np.bool_)


def together(looks: Any) -> Any:
    """Return the observations of K worlds with n agents as arrays ``[K, n, ...]``."""
    first = looks[0][0]
    if not isinstance(first, dict):
        return np.array(looks)
    return {
        name: together([[look[name] for look in row] for row in looks])
        for name in first
    }
