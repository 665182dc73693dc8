"""The interface of policies in the step loop: act on the row memory, in place.

A runner is bound once to the memory of its environments, one array ``[K, ...]`` per
key. From then on it reads observations from that memory and writes actions and the
policy's other outputs back to it.
"""

import abc
import copy
import ctypes
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Row, bytes_of
from marl_collect.core.random_actions import draw, samplers
from marl_collect.core.seeding import Purpose, generator_for
from marl_collect.core.signature import PolicySignature
from marl_collect.errors import PolicyError

_STREAMS = 1_000_000
"""Streams per policy, more than any policy has."""


class PolicyRunner(abc.ABC):
    """Acts for K environments on their memory.

    Attributes:
        chooses: whether ``begin_episodes`` must be called, because each episode has
            policies of its own.
        must_observe: whether ``probe`` must be called, with observations of a reset:
            the keys that a policy writes may depend on them.
        remembers: whether the memory has a previous frame's values of
            ``signature.kept``, which the policy then reads. Rollouts save them with
            the states.
    """

    chooses = False
    must_observe = True
    remembers = False

    @property
    @abc.abstractmethod
    def signature(self) -> PolicySignature:
        """The keys that the policy reads and writes.

        The rollout sets carried states to zero at the beginning of an episode.
        """

    def probe(self, memory: Row) -> None:  # noqa: B027 - random actions need no probe
        """Determine the signature; called before ``signature`` and ``bind``.

        Args:
            memory: of the environments, after a reset.
        """

    @abc.abstractmethod
    def bind(self, memory: Row) -> None:
        """Act on ``memory`` from now on: the environments' keys and the runner's."""

    def begin_episodes(self, seeds: Mapping[int, int]) -> None:  # noqa: B027 - for few
        """Handle the beginning of episodes.

        Args:
            seeds: seed of each environment that begins an episode, by its index.
        """

    def assigned(self) -> Any:
        """Return who acts in each environment, as arrays; None for a single policy."""
        return None

    def assign(self, assigned: Any) -> None:  # noqa: B027 - a single policy needs none
        """Restore what ``assigned`` returned."""

    @abc.abstractmethod
    def begin(self, frames: int, generators: "Generators") -> None:
        """Prepare for ``frames`` calls of ``act``."""

    @abc.abstractmethod
    def redraw(self, k: int, frame: int, generators: "Generators") -> None:
        """Sample the noise of one environment anew, from a frame to the slot's end.

        Args:
            k: the environment.
            frame: index since ``begin``.
            generators: those of ``begin``, of which that of ``k`` was restarted.
        """

    @abc.abstractmethod
    def act(self, frame: int) -> None:
        """Write the outputs for the observations in the memory.

        Args:
            frame: index since ``begin``.
        """

    @abc.abstractmethod
    def explain(self) -> str:
        """Return one sentence on how actions are computed, and why."""


class Generators:
    """The noise generators of K environments, one per environment and stream."""

    def __init__(self, seed: int, environments: range, generation: int = 0) -> None:
        """Derive all generators from ``seed`` and the environments' indices.

        Args:
            seed: of the collector.
            environments: indices of the environments.
            generation: number of restarts of their worker.
        """
        self._generation = generation
        self._origins = [(seed, k) for k in environments]
        self._made: dict[int, list[np.random.Generator]] = {}
        # Valid as long as the generators in `_made`.
        self._memory: dict[int, list[ctypes.Array[Any]]] = {}
        self._first = 0

    def apart(self, index: int) -> "Generators":
        """Return the generators of policy ``index`` of several.

        Policy 0 has those of a single policy. The state includes them all.
        """
        other = copy.copy(self)
        other._first = index * _STREAMS  # noqa: SLF001 - a copy of this object
        return other

    def of(self, stream: int) -> list[np.random.Generator]:
        """Return one generator per environment for this stream."""
        stream += self._first
        if stream not in self._made:
            self._made[stream] = [
                self._new(seed, environment, stream)
                for seed, environment in self._origins
            ]
        return self._made[stream]

    def restart(self, k: int, seed: int) -> None:
        """Derive the generators of one environment from the seed of its episode.

        Its noise then depends neither on the environment nor on earlier episodes.

        Args:
            k: position of the environment.
            seed: of the episode.
        """
        self._origins[k] = (seed, 0)
        for stream, made in self._made.items():
            made[k] = self._new(seed, 0, stream)
            if stream in self._memory:
                self._memory[stream][k] = _memory_of(made[k])

    def _new(self, seed: int, environment: int, stream: int) -> np.random.Generator:
        return generator_for(seed, Purpose.NOISE, environment, stream, self._generation)

    def mark(self) -> dict[int, bytes]:
        """Return copies of the generators' memory by stream, for ``states_of``.

        They are copied as memory, because reading ``bit_generator.state`` takes as long
        as drawing the noise of some frames.
        """
        for stream in self._made.keys() - self._memory.keys():
            self._memory[stream] = [_memory_of(g) for g in self._made[stream]]
        return {stream: b"".join(memory) for stream, memory in self._memory.items()}

    def load(self, states: Mapping[int, NDArray[np.int64]]) -> None:
        """Restore what ``states_of`` returned."""
        for stream, words in states.items():
            made = self._made[stream] = [
                np.random.Generator(np.random.SFC64(0)) for _ in self._origins
            ]
            for generator, inner in zip(made, words.view(np.uint64), strict=True):
                generator.bit_generator.state = {
                    "bit_generator": "SFC64",
                    "state": {"state": inner[:4]},
                    "has_uint32": int(inner[4]),
                    "uinteger": int(inner[5]),
                }


_STATE = np.dtype(
    [("state", np.uint64, 4), ("has_uint32", np.int32), ("uinteger", np.uint32)]
)
"""An SFC64 generator's state in memory."""


def _memory_of(generator: np.random.Generator) -> "ctypes.Array[Any]":
    """Return the memory of a generator's state, valid as long as the generator."""
    pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    # The first field of numpy's `bitgen_t` is the address of the state.
    interface = pointer(generator.bit_generator.capsule, b"BitGenerator")
    address = ctypes.c_void_p.from_address(interface).value
    assert address is not None
    return (ctypes.c_char * _STATE.itemsize).from_address(address)


def states_of(mark: Mapping[int, bytes]) -> dict[int, NDArray[np.int64]]:
    """Return the states that ``Generators.load`` restores, int64 ``[K, 6]`` by stream.

    Args:
        mark: from ``Generators.mark``.
    """
    states: dict[int, NDArray[np.int64]] = {}
    for stream, memory in mark.items():
        fields = np.frombuffer(memory, _STATE)
        words = np.empty((len(fields), 6), np.int64)
        words[:, :4] = fields["state"].view(np.int64)
        words[:, 4], words[:, 5] = fields["has_uint32"], fields["uinteger"]
        states[stream] = words
    return states


@final
class RandomRunner(PolicyRunner):
    """Takes random legal actions, with one generator per environment."""

    must_observe = False

    def __init__(
        self, description: EnvDescription, instead_of: PolicySignature | None = None
    ) -> None:
        """Act in environments of ``description``.

        Args:
            description: of the environments.
            instead_of: signature of the policy that this runner replaces for some
                frames. If the policy changes observations, these frames have the
                environments' own.
        """
        self._description = description
        self._samplers = list(samplers(description))
        self._instead_of = instead_of or self.signature

    @property
    def signature(self) -> PolicySignature:
        """A signature with the actions as outputs."""
        return PolicySignature(self._description.actions())

    def bind(self, memory: Row) -> None:
        """Write actions to ``memory``."""
        self._memory = memory
        place = self._instead_of.place
        self._unchanged = [
            (key, memory[place(key)], memory[key])
            for key in self._description.observed()
            if key in self._instead_of.apart
        ]

    def begin(self, frames: int, generators: Generators) -> None:
        """Sample the noise of all frames, and all actions without an action mask.

        Raises:
            PolicyError: if the policy changes an observation's shape or dtype, so the
                batch cannot store the environment's own; names the key.
        """
        for key, target, source in self._unchanged:
            fits = np.can_cast(source.dtype, target.dtype, "same_kind")
            if target.shape != source.shape or not fits:
                before = f"{list(source.shape[1:])}, {source.dtype}"
                after = f"{list(target.shape[1:])}, {target.dtype}"
                raise PolicyError(
                    f"The policy changes {'/'.join(key)} from {before}, to {after}, so "
                    "a batch cannot store the observation of frames with random "
                    "actions. Leave init_random_frames out, or let the policy write "
                    "to another key."
                )
        self._free = []
        self._drawn = []
        self._masked = []
        for stream, sampler in enumerate(self._samplers):
            noise = draw(sampler, generators.of(stream), frames)
            target = self._memory[sampler.key]
            if sampler.mask_key is None:
                drawn = sampler.actions(noise).swapaxes(0, 1)
                actions = np.ascontiguousarray(drawn, target.dtype)
                if target.size:
                    # Copying bytes takes a third of the time of assigning small arrays.
                    pair = (bytes_of(target), bytes_of(actions), target.nbytes)
                    self._free.append(pair)
                    self._drawn.append((stream, sampler, actions))
            else:
                mask, rest = self._memory[sampler.mask_key], noise.swapaxes(0, 1)
                self._masked.append((stream, sampler, target, rest, mask))

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample one environment's actions anew, from a frame to the slot's end."""
        for stream, sampler, actions in self._drawn:
            rest = draw(sampler, [generators.of(stream)[k]], len(actions) - frame)
            actions[frame:, k] = sampler.actions(rest[0])
        for stream, sampler, _, noise, _ in self._masked:
            rest = draw(sampler, [generators.of(stream)[k]], len(noise) - frame)
            noise[frame:, k] = rest[0]

    def act(self, frame: int) -> None:
        """Write this frame's actions."""
        for _, root, observed in self._unchanged:
            root[...] = observed
        for rows, actions, size in self._free:
            begin = frame * size
            rows[:] = actions[begin : begin + size]
        for _, sampler, chosen, noise, mask in self._masked:
            chosen[...] = sampler.actions(noise[frame], mask)

    def explain(self) -> str:
        """Return that actions are random."""
        return "Random actions, sampled for a whole slot at once if there is no mask."
