"""A small environment without dependencies whose every number can be recomputed.

Each agent carries an integer that its episode's seed starts and its actions move;
observations, rewards, deaths and the episode's end follow from these integers. Two
groups differ in observations and actions, and ``Fault`` makes the environment
fail on purpose, so that collectors can be tested on real processes.
"""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags

_MODULUS = 1009
"""A prime: numbers of agents seldom coincide by accident."""

_N_ACTIONS = 4

Phase = Literal["create", "reset", "step", "close"]
Kind = Literal["raise", "sleep", "hang", "kill", "exit"]


class CountingError(RuntimeError):
    """What an environment with ``Fault("raise")`` raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        kind: ``raise`` a ``CountingError``; ``sleep`` for ``seconds`` and go on;
            ``hang`` for ever; ``kill`` the process with ``signal``; ``exit`` it with
            code 3 without cleaning up; or call a function, such as one of
            ``marl_collect.testing.fault_actions``.
        phase: which call fails.
        at: how many calls of this phase go well first.
        repeat: whether later calls fail too.
        seconds: of sleep.
        signal: of the kill.
    """

    kind: Kind | Callable[[], None]
    phase: Phase = "step"
    at: int = 0
    repeat: bool = False
    seconds: float = 0.0
    signal: int = signal.SIGKILL

    def strike(self) -> None:
        """Do the harm."""
        if callable(self.kind):
            self.kind()
        elif self.kind == "raise":
            raise CountingError(f"fault in {self.phase}")
        elif self.kind == "sleep":
            threading.Event().wait(self.seconds)
        elif self.kind == "hang":
            threading.Event().wait()
        elif self.kind == "kill":
            os.kill(os.getpid(), self.signal)
        else:
            os._exit(3)


@dataclass(frozen=True)
class CountingOptions:
    """What a ``CountingEnv`` looks like.

    Attributes:
        n_hunters: agents of the group ``hunter``: Discrete actions.
        n_prey: agents of the group ``prey``: Box actions; 0 leaves the group out.
        min_length: steps of the shortest episode that is not cut short.
        max_length: steps of the longest one.
        deaths: whether agents die before the episode's end.
        action_mask: whether hunters have ``action_mask``.
        mask: whether ``mask`` is written.
        categorical_actions: False makes the hunters' actions one-hot.
        done_on_any: whether the first agent to be done ends the episode.
        state: whether there is a root ``state``.
        image: shape of an extra uint8 observation of hunters, whose observation is
            then the Dict of ``numbers`` and ``image``.
        episode_reward: whether ``episode_reward`` is written.
    """

    n_hunters: int = 2
    n_prey: int = 3
    min_length: int = 5
    max_length: int = 15
    deaths: bool = True
    action_mask: bool = False
    mask: bool = True
    categorical_actions: bool = True
    done_on_any: bool = False
    state: bool = False
    image: tuple[int, ...] | None = None
    episode_reward: bool = False


@final
class CountingEnv(MultiAgentEnv):
    """Agents that count; see the module.

    Observation of agent ``i`` (float32 ``[5]`` for hunters, ``[3]`` for prey): its
    number over 1009, steps since reset, ``i``; hunters also see the seed modulo 1009
    and their last action. Reward: its number modulo 7, minus 3. An agent that dies
    sees what killed it, and zeros from the step after.
    """

    def __init__(
        self,
        options: CountingOptions | None = None,
        *,
        fault: Fault | None = None,
        **changes: object,
    ) -> None:
        """Build the environment.

        Args:
            options: what it looks like.
            fault: what goes wrong.
            changes: fields of ``options`` to replace.
        """
        self._options = replace(options or CountingOptions(), **changes)  # type: ignore[arg-type]
        self._fault = fault
        self._calls = dict.fromkeys(("create", "reset", "step", "close"), 0)
        self._closed = False
        self._description = _describe(self._options)
        self._sizes = {
            name: group.n_agents for name, group in self._description.groups.items()
        }
        self._numbers = {
            name: np.zeros(n, dtype=np.int64) for name, n in self._sizes.items()
        }
        self._returns = {name: np.zeros(n) for name, n in self._sizes.items()}
        self._seed = self._steps = self._length = 0
        self._enter("create")

    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises."""
        return self._description

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    def bind(self, row: Row) -> None:
        """Read actions from and write everything else to ``row`` from now on."""
        self._row = row
        self._flags = Flags(row, self._description)

    def reset_row(self, seed: int) -> None:
        """Begin the episode of ``seed``."""
        self._enter("reset")
        self._flags.clear()
        self._seed, self._steps = seed, 0
        span = self._options.max_length - self._options.min_length + 1
        self._length = self._options.min_length + seed % span
        for shift, (name, numbers) in enumerate(self._numbers.items()):
            numbers[:] = (seed + 37 * np.arange(len(numbers)) + shift) % _MODULUS
            self._returns[name].fill(0)
            nothing = np.zeros(len(numbers), dtype=np.int64)
            self._observe(name, nothing, nothing == 0)

    def step_row(self) -> None:
        """Move every living agent's number by its action."""
        self._enter("step")
        self._steps += 1
        for name, numbers in self._numbers.items():
            alive = ~self._bools(name, "done")[:, 0]
            digits = np.where(alive, self._digits(name), 0)
            moved = (numbers * 31 + digits + 1) % _MODULUS
            numbers[:] = np.where(alive, moved, numbers)
            self._reward(name, np.where(alive, numbers % 7 - 3, 0))
            if self._options.deaths:
                for agent in np.flatnonzero(alive & (numbers % 13 == 0)):
                    self._flags.end(name, int(agent), terminated=True, truncated=False)
            self._observe(name, digits, alive)
        if self._steps >= self._length:
            self._flags.end_all(terminated=False, truncated=True)
        else:
            self._flags.settle()
        self._write_masks()

    def render(self) -> NDArray[np.uint8]:
        """Return an image ``[8, 8, 3]`` as bright as the episode is long."""
        return np.full((8, 8, 3), min(self._steps, 255), dtype=np.uint8)

    def close(self) -> None:
        """Give everything back."""
        if not self._closed:
            self._closed = True
            self._enter("close")

    def _enter(self, phase: Phase) -> None:
        call = self._calls[phase]
        self._calls[phase] += 1
        fault = self._fault
        if fault is None or fault.phase != phase:
            return
        if call == fault.at or (fault.repeat and call > fault.at):
            fault.strike()

    def _bools(self, *key: str) -> NDArray[np.bool_]:
        return cast("NDArray[np.bool_]", self._row[key])

    def _digits(self, name: str) -> NDArray[np.int64]:
        action = self._row[name, "action"]
        if name == "prey":
            clipped = np.clip(action.astype(np.float64), -1.0, 1.0)
            return np.floor(100 * clipped.sum(-1)).astype(np.int64)
        if not self._options.categorical_actions:
            return cast("NDArray[np.int64]", action.argmax(-1))
        return cast("NDArray[np.int64]", action)

    def _observe(
        self, name: str, digits: NDArray[np.int64], alive: NDArray[np.bool_]
    ) -> None:
        numbers = self._numbers[name]
        hunters_image = name == "hunter" and self._options.image is not None
        key = (name, "observation", *(("numbers",) if hunters_image else ()))
        view = cast("NDArray[np.float32]", self._row[key])
        view[:, 0] = numbers / _MODULUS
        view[:, 1] = self._steps
        view[:, 2] = np.arange(len(numbers))
        if name == "hunter":
            view[:, 3] = self._seed % _MODULUS
            view[:, 4] = digits
        view *= alive[:, None]
        if hunters_image:
            shape = (len(numbers), *(1 for _ in self._options.image or ()))
            pixels = np.where(alive, numbers % 256, 0).astype(np.uint8)
            self._row[name, "observation", "image"][...] = pixels.reshape(shape)
        if self._options.state:
            every = [n for numbers in self._numbers.values() for n in numbers]
            self._row["state",][...] = every
        if self._steps == 0:
            self._write_masks()

    def _reward(self, name: str, reward: NDArray[np.int64]) -> None:
        self._row[name, "reward"][:, 0] = reward
        self._returns[name] += reward
        if self._options.episode_reward:
            self._row[name, "episode_reward"][:, 0] = self._returns[name]

    def _write_masks(self) -> None:
        for name, numbers in self._numbers.items():
            alive = ~self._bools(name, "done")[:, 0]
            if self._options.mask:
                self._row[name, "mask"][...] = alive
            if self._options.action_mask and name == "hunter":
                legal = np.ones((len(numbers), _N_ACTIONS), dtype=np.bool_)
                legal[np.arange(len(numbers)), numbers % _N_ACTIONS] = False
                self._row[name, "action_mask"][...] = legal | ~alive[:, None]


def _describe(options: CountingOptions) -> EnvDescription:
    numbers = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    observation: spaces.Space[object] = cast("spaces.Space[object]", numbers)
    if options.image is not None:
        image = spaces.Box(0, 255, options.image, np.uint8)
        observation = cast(
            "spaces.Space[object]", spaces.Dict({"numbers": numbers, "image": image})
        )
    groups = {
        "hunter": GroupDescription(
            agents=tuple(f"hunter_{i}" for i in range(options.n_hunters)),
            observation=observation,
            action=cast("spaces.Space[object]", spaces.Discrete(_N_ACTIONS)),
            categorical_actions=options.categorical_actions,
            action_mask=options.action_mask,
            mask=options.mask,
            episode_reward=options.episode_reward,
        )
    }
    if options.n_prey:
        groups["prey"] = GroupDescription(
            agents=tuple(f"prey_{i}" for i in range(options.n_prey)),
            observation=cast(
                "spaces.Space[object]", spaces.Box(-np.inf, np.inf, (3,), np.float32)
            ),
            action=cast("spaces.Space[object]", spaces.Box(-1, 1, (2,), np.float32)),
            mask=options.mask,
            episode_reward=options.episode_reward,
        )
    agents = options.n_hunters + options.n_prey
    state = spaces.Box(0, _MODULUS, (agents,), np.float32)
    root = {"state": cast("spaces.Space[object]", state)} if options.state else {}
    return EnvDescription(
        name="counting",
        groups=groups,
        root=root,
        done_on_any=options.done_on_any,
        time_limit=options.max_length,
    )
