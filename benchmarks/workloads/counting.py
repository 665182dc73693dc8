"""A small environment whose every number can be recomputed, with faults on request.

Each agent has an integer that is initialised from the episode's seed and changed by the
agent's actions. Observations, rewards and deaths follow from these integers. Two groups
differ in observations and actions. ``Fault`` makes the environment fail on purpose, so
collectors can be tested with real processes.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags

_MODULUS = 1009
"""A prime, so that two agents' numbers rarely coincide."""

_N_ACTIONS = 4

Phase = Literal["create", "reset", "step", "close"]
Kind = Literal["raise", "sleep", "hang", "kill", "exit"]


class CountingError(RuntimeError):
    """Raised by an environment with ``Fault("raise")``."""


@dataclass(frozen=True)
class Fault:
    """A failure of an environment: what happens, and in which call.

    Attributes:
        kind: ``raise`` a ``CountingError``; ``sleep`` for ``seconds``, then continue;
            ``hang`` forever; ``kill`` the process with ``signal``; ``exit`` with code 3
            and without cleanup; or a function to call, such as ``stuck`` or ``flood``.
        phase: the kind of call that fails.
        at: number of calls of this phase that succeed first.
        repeat: whether all later calls of this phase fail too.
        seconds: duration of ``sleep``.
        signal: signal of ``kill``.
    """

    kind: Kind | Callable[[], None]
    phase: Phase = "step"
    at: int = 0
    repeat: bool = False
    seconds: float = 0.0
    signal: int = signal.SIGKILL

    def strike(self) -> None:
        """Fail in the way of ``kind``."""
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


def stuck() -> None:
    """Block in C code forever, holding the interpreter lock."""
    ctypes.PyDLL(None).sleep(100_000)


def flood() -> None:
    """Write 512 KiB to file descriptor 1, as C libraries do, and 512 KiB to stdout."""
    line = b"warning: this is an unwanted line of sixty-four characters.....\n"
    os.write(1, line * 8192)
    sys.stdout.write(line.decode() * 8192)


class UnpicklableError(RuntimeError):
    """An exception that cannot be pickled, because it has a lock."""

    def __init__(self, text: str) -> None:
        """Store the message and a lock."""
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    """Raise an exception that cannot be pickled."""
    raise UnpicklableError("holds a lock")


@dataclass(frozen=True)
class CountingOptions:
    """Options of a ``CountingEnv``.

    Attributes:
        n_hunters: agents in the group ``hunter``, which has Discrete actions.
        n_prey: agents in the group ``prey``, which has Box actions; 0 for no group.
        min_length: minimum steps of an episode that does not end early.
        max_length: maximum steps of an episode.
        deaths: whether agents die before the end of the episode.
        action_mask: whether hunters have ``action_mask``.
        mask: whether ``mask`` is written.
        categorical_actions: False makes the hunters' actions one-hot.
        done_on_any: whether the episode ends with the first agent that is done.
        state: whether there is a root ``state``.
        image: shape of an additional uint8 observation of hunters. Their observation
            is then a Dict of ``numbers`` and ``image``.
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
    """An environment of agents that count; see the module.

    Agent ``i`` observes its number divided by 1009, the steps since the reset, and
    ``i``. Hunters also observe the seed modulo 1009 and their last action. Observations
    are float32, ``[5]`` for hunters and ``[3]`` for prey. The reward is the number
    modulo 7, minus 3. In the step in which it dies, an agent still observes its number;
    after that its row is zeros.
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
            options: of the environment.
            fault: failure on purpose; None for none.
            changes: fields of ``options`` to replace.
        """
        self._options = replace(options or CountingOptions(), **changes)  # type: ignore[arg-type]
        self._fault = fault
        self._calls = dict.fromkeys(("create", "reset", "step", "close"), 0)
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
        """Update the number of every living agent by its action."""
        self._enter("step")
        self._steps += 1
        for name, numbers in self._numbers.items():
            alive = ~self._bools(name, "done")[:, 0]
            digits = np.where(alive, self._digits(name), 0)
            next_numbers = (numbers * 31 + digits + 1) % _MODULUS
            numbers[:] = np.where(alive, next_numbers, numbers)
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
        """Return an image ``[8, 8, 3]`` whose brightness is the number of steps."""
        return np.full((8, 8, 3), min(self._steps, 255), dtype=np.uint8)

    def close(self) -> None:
        """Close the environment; later calls do nothing."""
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
            all_numbers = [n for numbers in self._numbers.values() for n in numbers]
            self._row["state",][...] = all_numbers
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
    observation: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    if options.image is not None:
        image = spaces.Box(0, 255, options.image, np.uint8)
        observation = spaces.Dict({"numbers": observation, "image": image})
    groups = {
        "hunter": GroupDescription(
            agents=tuple(f"hunter_{i}" for i in range(options.n_hunters)),
            observation=observation,
            action=spaces.Discrete(_N_ACTIONS),
            categorical_actions=options.categorical_actions,
            action_mask=options.action_mask,
            mask=options.mask,
            episode_reward=options.episode_reward,
        )
    }
    if options.n_prey:
        groups["prey"] = GroupDescription(
            agents=tuple(f"prey_{i}" for i in range(options.n_prey)),
            observation=spaces.Box(-np.inf, np.inf, (3,), np.float32),
            action=spaces.Box(-1, 1, (2,), np.float32),
            mask=options.mask,
            episode_reward=options.episode_reward,
        )
    agents = options.n_hunters + options.n_prey
    state: spaces.Space[Any] = spaces.Box(0, _MODULUS, (agents,), np.float32)
    root = {"state": state} if options.state else {}
    return EnvDescription(
        name="counting",
        groups=groups,
        root=root,
        done_on_any=options.done_on_any,
        time_limit=options.max_length,
    )
