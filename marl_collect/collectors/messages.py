"""The messages between a collector and its workers: commands and replies.

    trainer                                       worker
    WorkerAssignment (at the start) ----------->  build the environments
                            <-------------------  WorkerReady
    UsePlan ---------------------------------->
    SkeletonPolicy | CallablePolicy | ... ----->  build the policy, call it
                            <-------------------  PolicyReady
    UseWeights, after CallablePolicy --------->   weights live in the shared vector
                            <-------------------  MemoryAttached
    UseSlot ---------------------------------->   map a slot
                            <-------------------  MemoryAttached
    Collect(slot, weights) ------------------->   fill the slot's rows
                            <-------------------  Collected

and, between rollouts, commands that are answered by Done. After ``MemoryAttached`` only
small messages cross: no batch and no weight is ever pickled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from marl_collect.buffers.frame_writer import LastObservation
from marl_collect.buffers.layout import Layout
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory
from marl_collect.core.signature import PolicySignature
from marl_collect.policies.choose import ActingOptions
from marl_collect.processes.shared_memory import MemoryHandle
from marl_collect.rollout.episodes import Episode, Plan
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import Handle, WeightLayout
from marl_collect.weights.skeleton import Skeleton

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerAssignment:
    """What a worker is started with.

    Attributes:
        factories: of the worker's environments.
        first: index of the first environment, for messages.
        acting: how the policy acts.
        num_threads: torch threads.
        init_fn: called first.
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
class UsePlan:
    """Take environment numbers, episode numbers and the seed from this plan."""

    plan: Plan


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
    """Act with this callable, which has no weights; or with what it builds.

    Attributes:
        policy: the callable.
        builds: whether it is a factory.
        trust: take what is built as a callable on TensorDicts.
    """

    policy: Callable[..., Any]
    builds: bool
    trust: bool


@dataclass(frozen=True)
class PolicyReady:
    """The policy acted once, on the observations of a reset.

    Attributes:
        signature: what it reads and writes.
        layout: of its weights, None if it has none.
    """

    signature: PolicySignature
    layout: WeightLayout | None


@dataclass(frozen=True)
class UseWeights:
    """Read weights from here on from this shared memory.

    Attributes:
        handle: of the memory.
        publish: write the policy's own weights there first, at place 0.
    """

    handle: Handle
    publish: bool = False


@dataclass(frozen=True)
class UseSlot:
    """Map the memory of a slot.

    Attributes:
        slot: its number.
        memory: of the slot.
        layout: of the slot.
        rows: the worker's, begin and end.
        frames: that the worker fills of each row.
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
        order: a number of its own, which the worker notes once it has read them.
        version: of the weights.
        place: of the vector where they are; None if the worker has them.
        handle: of that vector, if it is another than before.
        settings: of the policy, if they are others than before.
    """

    order: int = 0
    version: int = 0
    place: int | None = None
    handle: Handle | None = None
    settings: Settings | None = None


@dataclass(frozen=True)
class Collect:
    """Fill the worker's rows of a slot.

    Attributes:
        slot: number of the slot.
        random: act at random.
        reset: begin new episodes first.
        snapshot: keep the state before this rollout, until the next one.
        weights: to act with.
    """

    slot: int
    random: bool = False
    reset: bool = False
    snapshot: bool = False
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True)
class Collected:
    """The rows are filled.

    Attributes:
        frames: valid ones of each row.
        episodes: that ended.
        running: number of each environment's running episode.
        seconds: spent in resets and in the whole rollout.
        last: observations that the slot has no ``next`` for, with ``compact_obs``.
    """

    frames: int
    episodes: tuple[Episode, ...]
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
        before: the state before the last rollout, not the one after it.
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
    """Return an attribute of the ``"env"`` or the ``"policy"``."""

    owner: str
    name: str


@dataclass(frozen=True)
class Explain:
    """Say which path the policy takes, and why."""


@dataclass(frozen=True)
class Done:
    """The command has been executed, with this result."""

    value: Any = None


def expect(reply: Any, kind: type[T], index: int) -> T:
    """Return a worker's reply, which must be of a kind.

    Raises:
        TypeError: naming the worker and what it replied, if it is another.
    """
    if not isinstance(reply, kind):
        raise TypeError(
            f"Worker {index} replied {reply!r}, but {kind.__name__} was expected."
        )
    return reply
