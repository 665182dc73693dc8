"""Tasks of families whose environments are single worlds: a loop, and our collector.

The loop steps the library's environment with random actions. It stores observations at
the root and under ``next``, actions, rewards and flags. Environments of
``gymnasium.make`` are built without Gymnasium's checker. An episode ends with the
first agent that is done, as in ours. Of agents that act in turn, the loop stores the
one whose turn it is.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import gymnasium
import numpy as np
from gymnasium import spaces
from harness.turns import Alternative
from typing_extensions import override

from cases.case import Case, collecting
from marl_collect.cli.tasks import find_factory
from marl_collect.collectors import Collector

FRAMES = 2000


class Stock(ABC):
    """An environment as its library's users step it.

    Attributes:
        fields: name of each array of observations to shape and dtype of one frame.
        shape: of the rewards of a frame.
        drawn: random actions of all frames of a batch.
    """

    fields: Mapping[str, tuple[tuple[int, ...], Any]]
    shape: tuple[int, ...]
    drawn: Any

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Begin an episode."""

    @abstractmethod
    def observe(self, arrays: Mapping[str, Any], frame: int) -> None:
        """Store the observations as ``frame`` of arrays ``[FRAMES, ...]``."""

    @abstractmethod
    def advance(self, samples: Any, rewards: Any, flags: Any) -> Any:
        """Step once.

        Args:
            samples: one of ``self.drawn``.
            rewards: of the frame, ``[*shape]``; to be written.
            flags: the frame's terminated and truncated, ``[*shape, 2]``; the same.

        Returns:
            The actions.
        """


def draw(space: Any, shape: tuple[int, ...]) -> Any:
    """Return random elements of a space, ``[*shape, ...]``."""
    random = np.random.default_rng(0)
    if isinstance(space, spaces.Box):
        size = (*shape, *space.shape)
        return random.uniform(space.low, space.high, size).astype(space.dtype)
    return random.integers(0, space.n, shape)


@final
class Lists(Stock):
    """An environment with Gymnasium's methods and lists of agents."""

    def __init__(self, family: str, task: str) -> None:
        """Build the environment."""
        if family == "overcooked":
            self._env: Any = Kitchen(task)
        else:
            importlib.import_module(family)  # It registers its tasks.
            self._env = gymnasium.make(task, disable_env_checker=True)
        observed, action_spaces = self._env.observation_space, self._env.action_space
        self.shape = (len(action_spaces),)
        shape = (*self.shape, *observed[0].shape)
        self.fields = {"observation": (shape, np.float32)}
        self.drawn = draw(action_spaces[0], (FRAMES, *self.shape))

    @override
    def begin(self, seed: int) -> None:
        self._observed, _ = self._env.reset(seed=seed)

    @override
    def observe(self, arrays: Mapping[str, Any], frame: int) -> None:
        """Store the list."""
        arrays["observation"][frame] = self._observed

    @override
    def advance(self, samples: Any, rewards: Any, flags: Any) -> Any:
        """Step all agents, which end together."""
        self._observed, rewards[:], *ends, _ = self._env.step(list(samples))
        flags[:] = ends
        return samples


@final
class Kitchen:
    """A layout of Overcooked-AI: its states and encodings, and 400 frames."""

    def __init__(self, layout: str) -> None:
        """Build the layout."""
        from marl_collect.envs.overcooked.env import import_overcooked

        library = import_overcooked()
        self._mdp = library.OvercookedGridworld.from_layout_name(layout)
        self._choices = library.Action.INDEX_TO_ACTION
        shape = self._mdp.get_lossless_state_encoding_shape()
        self.observation_space = [spaces.Box(0, np.inf, tuple(shape), np.float32)] * 2
        self.action_space = [spaces.Discrete(len(self._choices))] * 2

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return the state at the start, which is always the same."""
        del seed
        self._state = self._mdp.get_standard_start_state()
        return self._mdp.lossless_state_encoding(self._state), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Step both players, who share the reward."""
        joint = [self._choices[action] for action in actions]
        self._state, infos = self._mdp.get_state_transition(self._state, joint)
        reward = sum(infos["sparse_reward_by_agent"])
        observed = self._mdp.lossless_state_encoding(self._state)
        return observed, reward, False, self._state.timestep >= 400, infos


@final
class Parallel(Stock):
    """A ParallelEnv of PettingZoo whose agents have equal spaces."""

    def __init__(self, family: str, task: str) -> None:
        """Build the environment."""
        if family == "mamujoco":
            from gymnasium_robotics import mamujoco_v1

            self._env: Any = mamujoco_v1.parallel_env(*task.split("-"))
        else:
            from marl_collect.envs.pettingzoo.tasks import find_task

            self._env = find_task(task)()
        agents = self._env.possible_agents
        self._rows = {agent: row for row, agent in enumerate(agents)}
        self.shape = (len(agents),)
        space = self._env.observation_space(agents[0])
        self.fields = {"observation": ((*self.shape, *space.shape), space.dtype)}
        self.drawn = draw(self._env.action_space(agents[0]), (FRAMES, *self.shape))

    @override
    def begin(self, seed: int) -> None:
        self._observed, _ = self._env.reset(seed=seed)

    @override
    def observe(self, arrays: Mapping[str, Any], frame: int) -> None:
        """Store the rows of the agents that are alive."""
        target = arrays["observation"][frame]
        for agent, observation in self._observed.items():
            target[self._rows[agent]] = observation

    @override
    def advance(self, samples: Any, rewards: Any, flags: Any) -> Any:
        """Step all agents."""
        actions = {agent: samples[row] for agent, row in self._rows.items()}
        self._observed, reward, terminated, truncated, _ = self._env.step(actions)
        for agent in self._observed:
            row = self._rows[agent]
            rewards[row] = reward[agent]
            flags[row] = terminated[agent], truncated[agent]
        return samples


@final
class Turns(Stock):
    """An AECEnv of PettingZoo or Shimmy, with masks of legal actions."""

    def __init__(self, family: str, task: str) -> None:
        """Build the environment."""
        if family == "openspiel":
            from shimmy.openspiel_compatibility import OpenSpielCompatibilityV0

            self._env: Any = OpenSpielCompatibilityV0(game_name=task)
            self._env.reset(seed=0)
        else:
            from marl_collect.envs.pettingzoo.tasks import find_task

            self._env = find_task(task, parallel=False)()
        agents = self._env.possible_agents
        self._rows = {agent: row for row, agent in enumerate(agents)}
        self.shape = (len(agents),)
        space = self._env.observation_space(agents[0])
        self._in_observation = isinstance(space, spaces.Dict)
        if isinstance(space, spaces.Dict):
            space = space["observation"]
        number = self._env.action_space(agents[0]).n
        self.fields = {
            "observation": (space.shape, space.dtype),
            "action_mask": ((number,), np.bool_),
        }
        self.drawn = np.random.default_rng(0).random(FRAMES)

    @override
    def begin(self, seed: int) -> None:
        self._env.reset(seed=seed)
        self._look()

    @override
    def observe(self, arrays: Mapping[str, Any], frame: int) -> None:
        """Store what the agent observes whose turn it is."""
        arrays["observation"][frame] = self._observed
        arrays["action_mask"][frame] = self._mask

    @override
    def advance(self, samples: Any, rewards: Any, flags: Any) -> Any:
        """Take a legal action."""
        legal = self._mask.nonzero()[0]
        action = int(legal[int(samples * len(legal))])
        self._env.step(action)
        for agent, row in self._rows.items():
            rewards[row] = self._env.rewards[agent]
            ends = self._env.terminations[agent], self._env.truncations[agent]
            flags[row] = ends
        self._look()
        return action

    def _look(self) -> None:
        self._observed, *_, info = self._env.last()
        self._mask = info.get("action_mask")
        if self._in_observation:
            self._mask = self._observed["action_mask"]
            self._observed = self._observed["observation"]


@final
class Lab(Stock):
    """A substrate of MeltingPot, or a level of Lab2d with one player."""

    def __init__(self, family: str, task: str) -> None:
        """Build the environment."""
        env = find_factory(f"{family}/{task}", {})()
        keys = [k for k in env.description.row() if k[1:2] == ("observation",)]
        env.close()
        names = [key[2] for key in keys]
        if family == "meltingpot":
            import meltingpot

            roles = meltingpot.substrate.get_config(task).default_player_roles
            self._env: Any = meltingpot.substrate.build(task, roles=roles)
            (*_, spec), players = self._env.action_spec(), len(roles)
            self.drawn = draw(spaces.Discrete(spec.num_values), (FRAMES, players))
            observed = self._env.observation_spec()[0]
        else:
            import dmlab2d
            from dmlab2d import runfiles_helper

            settings = {"levelName": task}
            lab, players = dmlab2d.Lab2d(runfiles_helper.find(), settings), 1
            self._env = dmlab2d.Environment(lab, names, seed=0)
            random = np.random.default_rng(0)
            self.drawn = [
                {
                    name: random.integers(spec.minimum, spec.maximum + 1)
                    for name, spec in self._env.action_spec().items()
                }
                for _ in range(FRAMES)
            ]
            observed = self._env.observation_spec()
        self._several = family == "meltingpot"
        self.shape = (players,)
        self.fields = {
            name: ((players, *observed[name].shape), observed[name].dtype)
            for name in names
        }

    @override
    def begin(self, seed: int) -> None:
        del seed  # Their resets take none.
        self._step = self._env.reset()

    @override
    def observe(self, arrays: Mapping[str, Any], frame: int) -> None:
        """Store what each player observes."""
        observed = self._step.observation
        for name, array in arrays.items():
            if not self._several:
                array[frame] = observed[name]
                continue
            for player, values in enumerate(observed):
                array[frame, player] = values[name]

    @override
    def advance(self, samples: Any, rewards: Any, flags: Any) -> Any:
        """Step all players, who end together."""
        self._step = self._env.step(samples)
        rewards[:] = self._step.reward
        if self._step.last():
            flags[:, 0] = True
        return samples


STOCK: Mapping[type[Stock], Mapping[str, tuple[str, ...]]] = {
    Lists: {
        "lbforaging": (
            "Foraging-5x5-3p-1f-v3",
            "Foraging-8x8-2p-3f-v3",
            "Foraging-15x15-4p-3f-v3",
        ),
        "rware": ("rware-tiny-2ag-v2", "rware-small-4ag-v2"),
        "overcooked": ("cramped_room",),
    },
    Parallel: {
        "sisl": ("multiwalker_v9",),
        "mpe": ("simple_spread_v3",),
        "magent": ("battle_v4",),
        "mamujoco": ("Ant-4x2",),
    },
    Turns: {"classic": ("connect_four_v3",), "openspiel": ("kuhn_poker",)},
    Lab: {"meltingpot": ("coins",), "lab2d": ("chase_eat",)},
}
"""Tasks by family, for each kind of environment."""


def stock_loop(env: Stock) -> Callable[[], float]:
    """Return a call that stores a batch."""
    root, following = (
        {
            name: np.zeros((FRAMES, *shape), dtype)
            for name, (shape, dtype) in env.fields.items()
        }
        for _ in range(2)
    )
    rewards = np.zeros((FRAMES, *env.shape), np.float32)
    flags = np.zeros((FRAMES, *env.shape, 2), np.bool_)
    actions: list[Any] = [None] * FRAMES
    episode = 0
    env.begin(episode)

    def call() -> float:
        nonlocal episode
        flags[:] = False
        for frame in range(FRAMES):
            env.observe(root, frame)
            actions[frame] = env.advance(env.drawn[frame], rewards[frame], flags[frame])
            env.observe(following, frame)
            if flags[frame].any():
                episode += 1
                env.begin(episode)
        return float(FRAMES)

    return call


def build(
    stack: ExitStack, stock: Callable[[str, str], Stock], name: str
) -> dict[str, Alternative]:
    """Return the loop and the collector for ``"family/task"``."""
    factory = find_factory(name, {})
    factory().close()  # The error of a missing library names what to install.
    collector = stack.enter_context(
        Collector(factory, None, frames_per_batch=FRAMES, total_frames=-1, seed=0)
    )
    return {
        "stock loop that stores": Alternative(stock_loop(stock(*name.split("/")))),
        "Collector": collecting(collector),
    }


def cases() -> list[Case]:
    """Return a row per task."""
    return [
        Case(
            f"{family}/{task}",
            partial(build, stock=stock, name=f"{family}/{task}"),
            "frame",
        )
        for stock, families in STOCK.items()
        for family, tasks in families.items()
        for task in tasks
    ]
