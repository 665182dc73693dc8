"""The messages between a collector and its workers: commands and replies.

    trainer                                       worker
    WorkerAssignment (at the start) ----------->  build the environments
                            <-------------------  WorkerReady
    Plan ------------------------------------->   number the environments
    SkeletonPolicy | BuiltPolicy | ... -------->  build the policy, call it
                            <-------------------  PolicyReady
    PublishWeights, after BuiltPolicy --------->  publish the policy's weights
                            <-------------------  MemoryAttached
    UseSlot ---------------------------------->   map a slot
                            <-------------------  MemoryAttached
    Collect(slot, weights) ------------------->   fill the slot's rows
                            <-------------------  Collected

Between rollouts there are further commands with the reply ``Done``. After
``MemoryAttached`` all messages are small: batches and weights are never pickled.
"""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import cloudpickle

from marl_collect.buffers.frame_writer import LastObservation
from marl_collect.buffers.layout import Layout
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory
from marl_collect.core.signature import PolicySignature
from marl_collect.errors import Failure, raise_failure
from marl_collect.policies.choose import ActingOptions
from marl_collect.processes.shared_memory import MemoryHandle
from marl_collect.rollout.episodes import EndedEpisodes
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import Handle
from marl_collect.weights.skeleton import Skeleton

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerAssignment:
    """The arguments of a worker's main function.

    Attributes:
        factories: of the worker's environments.
        first: index of the first environment, for error messages.
        acting: how the policy acts.
        num_threads: number of torch threads.
        init_fn: called before anything is built.
    """

    factories: tuple[Factory, ...]
    first: int
    acting: ActingOptions
    num_threads: int
    init_fn: Callable[[], Any] | None


@dataclass(frozen=True)
class WorkerReady:
    """The worker has built ``size`` environments of this description."""

    description: EnvDescription
    size: int


@dataclass(frozen=True)
class RandomActions:
    """Act at random."""


@dataclass(frozen=True)
class SkeletonPolicy:
    """Act with this module, on shared weights.

    Attributes:
        skeleton: the module without its weights.
        handle: of the weights' memory.
        place: of the initial weights.
    """

    skeleton: Skeleton
    handle: Handle
    place: int


@dataclass(frozen=True)
class CallablePolicy:
    """Act with a callable that has no weights."""

    policy: Callable[..., Any]


@dataclass(frozen=True)
class BuiltPolicy:
    """Act with the policy that a factory builds.

    Attributes:
        factory: builds the policy.
        index: of the factory in a list; 0 if all workers have the same factory.
        trust: call the policy on TensorDicts without inspecting its arguments.
    """

    factory: Callable[[], Any]
    index: int
    trust: bool


@dataclass(frozen=True)
class PolicyReady:
    """The policy has acted on the observations of a reset.

    Attributes:
        signature: the keys that it reads and writes.
        layout: of its weights, None if it has none.
    """

    signature: PolicySignature
    layout: WeightLayout | None


@dataclass(frozen=True)
class PublishWeights:
    """Write the policy's own weights to this memory, and read from there from now on.

    Attributes:
        handle: of the memory.
    """

    handle: Handle


@dataclass(frozen=True)
class UseSlot:
    """Map the memory of a slot.

    Attributes:
        slot: its number.
        memory: of the slot.
        layout: of the slot.
        rows: begin and end of the worker's rows.
        frames: number of frames that the worker fills in each row.
    """

    slot: int
    memory: MemoryHandle
    layout: Layout
    rows: tuple[int, int]
    frames: int


@dataclass(frozen=True)
class MemoryAttached:
    """The memory is mapped."""


@dataclass(frozen=True)
class Weights:
    """Act with these weights.

    Attributes:
        order: a unique number, which the worker records once it has read the weights.
        version: of the weights.
        place: the place in the vector to read; None if the worker has the weights.
        ranges: indices of the layout's ranges that the worker lacks.
        handle: of the vector, if it has changed.
        settings: of the policy, if they have changed.
    """

    order: int = 0
    version: int = 0
    place: int | None = None
    ranges: Sequence[int] = ()
    handle: Handle | None = None
    settings: Settings | None = None


@dataclass(frozen=True)
class Collect:
    """Fill the worker's rows of a slot.

    Attributes:
        slot: number of the slot.
        random: act at random.
        reset: begin new episodes first.
        snapshot: keep the state before this rollout until the next one.
        vacant: numbers of slots whose memory the trainer has freed.
        weights: the weights to act with.
    """

    slot: int
    random: bool = False
    reset: bool = False
    snapshot: bool = False
    vacant: tuple[int, ...] = ()
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True)
class Collected:
    """The rows are filled.

    Attributes:
        frames: number of valid frames in each row.
        episodes: the episodes that ended.
        running: number of each environment's running episode.
        seconds: time spent in resets and in the whole rollout.
        last: with ``compact_obs``, the last observations of episodes and of the slot.
    """

    frames: int
    episodes: EndedEpisodes
    running: tuple[int, ...]
    seconds: Mapping[str, float]
    last: tuple[LastObservation, ...] = ()


@dataclass(frozen=True)
class BeginEpisodes:
    """Begin a new episode in every environment."""


@dataclass(frozen=True)
class Reseed:
    """Derive all random numbers from this seed, and begin new episodes."""

    seed: int


@dataclass(frozen=True)
class GetState:
    """Return the state of the rollout.

    Attributes:
        before: return the state before the last rollout instead of the current one.
    """

    before: bool


@dataclass(frozen=True)
class LoadState:
    """Resume from this state.

    Attributes:
        state: of a rollout.
        begin: begin the next episodes instead of replaying the running ones.
    """

    state: Any
    begin: bool = False


@dataclass(frozen=True)
class GetAttribute:
    """Return an ``Attribute`` of the ``"env"`` or the ``"policy"``."""

    owner: str
    name: str


@dataclass(frozen=True)
class Attribute:
    """The value of an attribute, or the error of a property of the user.

    Attributes:
        value: pickled, so that a value which cannot be sent is such an error too.
        failure: None if there is a value.
    """

    value: bytes = b""
    failure: Failure | None = None

    @classmethod
    def read(cls, function: Callable[[], Any]) -> "Attribute":
        """Return what ``function`` returns, or its error."""
        try:
            return cls(cloudpickle.dumps(function(), protocol=5))
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            return cls(failure=Failure.capture(error, os.getpid()))

    def get(self, worker: int) -> Any:
        """Return the value.

        Args:
            worker: index of the sender.

        Raises:
            Exception: the error, from a ``WorkerError``.
        """
        if self.failure is not None:
            raise_failure(self.failure, worker)
        return pickle.loads(self.value)


@dataclass(frozen=True)
class Explain:
    """Describe how the policy runs, and why."""


@dataclass(frozen=True)
class Done:
    """The command has been executed, with this result."""

    value: Any = None


def expect(reply: Any, kind: type[T], index: int) -> T:
    """Check the type of a worker's reply and return it.

    Raises:
        TypeError: if it has another type. The message has the worker and the reply.
    """
    if not isinstance(reply, kind):
        raise TypeError(
            f"Worker {index} replied {reply!r}, but {kind.__name__} was expected."
        )
    return reply
