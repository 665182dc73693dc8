"""``FrameStack``: agents observe their last observations too."""

from dataclasses import replace
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.batched import BatchedEnv
from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    Key,
    Row,
    bytes_of,
    leaves,
)
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.options import Option, require

Space = spaces.Space[Any]


@final
class FrameStack(EnvWrapper):
    """Stacks each agent's last observations along a new first axis, oldest first.

    An observation ``[*shape]`` becomes ``[frames, *shape]``, with the same dtype. So do
    all Box observations of Dict and Tuple spaces. Other spaces and the root stay as
    they are.

    When an agent begins to act in an episode, or returns to it, all frames are its
    first observation, as in Gymnasium's ``FrameStackObservation`` by default. The stack
    of an agent advances in the steps after which it acts, and in the step in which it
    ends. While it waits, the stack stays, so turn-based games stack an agent's own
    turns. Agents that have not joined have zeros.

    A step moves the memory of a stack by one frame in place and writes the new frame.
    Batches and datasets contain every stack, which is ``frames`` times the memory.

    Example:
        >>> factory = lambda: FrameStack(MeltingpotEnv("coins"), frames=4)
    """

    def __init__(
        self, env: MultiAgentEnv | BatchedEnv | EnvWrapper, frames: int = 4
    ) -> None:
        """Own ``env``; ``close`` closes it.

        Args:
            env: the environment, or a simulator of many worlds.
            frames: number of observations in a stack.

        Raises:
            TypeError: if ``env`` is not an environment of marl_collect, or ``frames``
                is not an integer.
            ValueError: if ``frames`` is less than 1.
        """
        frames = require("frames", frames, int, Option("", at_least=1))
        description = getattr(env, "description", None)
        stacked = (
            _stacked(description, frames)
            if isinstance(description, EnvDescription)
            else None
        )
        super().__init__(env, stacked)

    @override
    def bind(self, row: Row) -> None:
        super().bind(row)
        self._groups = [
            _Group(name, group, self.env_row, row)
            for name, group in self.env.description.groups.items()
        ]

    @override
    def after_reset(self, begun: Any, seed: Any) -> None:
        for group in self._groups:
            group.begin(begun)

    @override
    def after_step(self) -> None:
        for group in self._groups:
            group.step()


@final
class _Group:
    """The stacks of one group of n agents, in all worlds.

    Flags are ``[*worlds, n]``. A step works on rows of agents, whatever their world.
    """

    def __init__(
        self, name: str, group: GroupDescription, source: Row, target: Row
    ) -> None:
        keys: list[Key] = [
            key
            for key, _ in leaves(group.observation, (name, "observation"))
            # An empty observation has nothing to stack.
            if source[key] is not target[key] and source[key].size
        ]
        self._pairs = [(source[key], target[key]) for key in keys]
        self._done = target[name, "done"][..., 0]
        self._mask = target.get((name, "mask"))
        self._started = np.zeros(self._done.shape, np.bool_)
        self._over = np.zeros(self._done.shape, np.bool_)
        axes = self._done.ndim
        self._rows = [
            (
                frame.reshape(-1, *frame.shape[axes:]),
                stack.reshape(-1, *stack.shape[axes:]),
            )
            for frame, stack in self._pairs
        ]
        # Memory of all stacks, and the size of one frame in it.
        self._memory = [
            (bytes_of(stack), frame[0].size * stack.itemsize)
            for frame, stack in self._rows
        ]

    def begin(self, begun: Any) -> None:
        """Begin episodes in the worlds of ``begun``, an index."""
        acts = self._acting()
        self._over[begun] = False
        self._started[begun] = acts[begun]
        waits = np.zeros_like(acts)
        waits[begun] = ~acts[begun]
        for frame, stack in self._pairs:
            stack[begun] = np.expand_dims(frame[begun], acts.ndim)
            stack[waits] = 0

    def step(self) -> None:
        """Advance the stacks of agents that act or have just ended."""
        done = self._done.astype(np.bool_)
        moves = (self._acting() & ~done) | (done & ~self._over)
        self._started &= ~self._over | done
        if moves.all() and self._started.all():
            for (frame, stack), (memory, size) in zip(
                self._rows, self._memory, strict=True
            ):
                # Also moves the first frame of an agent into the last one of the agent
                # before, which is written next.
                memory[:-size] = memory[size:]
                stack[:, -1] = frame
        else:
            self._move(moves)
        self._started |= moves
        self._over[:] = done

    def _move(self, moves: NDArray[np.bool_]) -> None:
        again = np.flatnonzero(moves & self._started)
        first = np.flatnonzero(moves & ~self._started)
        for frame, stack in self._rows:
            stack[again, :-1] = stack[again, 1:]
            stack[again, -1] = frame[again]
            stack[first] = frame[first][:, None]

    def _acting(self) -> NDArray[np.bool_]:
        if self._mask is None:
            return ~self._done.astype(np.bool_)
        return self._mask.astype(np.bool_)


def _stacked(description: EnvDescription, frames: int) -> EnvDescription:
    groups = {
        name: replace(group, observation=_space(group.observation, frames))
        for name, group in description.groups.items()
    }
    return replace(description, groups=groups)


def _space(space: Space, frames: int) -> Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({k: _space(s, frames) for k, s in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_space(s, frames) for s in space.spaces])
    if not isinstance(space, spaces.Box):
        return space
    low, high = (np.repeat(x[None], frames, 0) for x in (space.low, space.high))
    return spaces.Box(low, high, dtype=space.dtype.type)
