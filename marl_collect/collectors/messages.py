"""What crosses a collector's sockets: the trainer's commands, the workers' replies.

    trainer                                       worker
    Assignment (at the start) ----------------->  build the environments
                            <-------------------  Ready
    SkeletonPolicy | FactoryPolicy | ... ------>  build the policy, dry run
                            <-------------------  PolicyReady
    UseWeights ------------------------------->   weights live in the shared vector
                            <-------------------  Attached
    UseSlot ---------------------------------->   map a slot
                            <-------------------  Attached
    Collect(slot, version) ------------------->   fill the slot's rows
                            <-------------------  Collected

After ``Attached`` only small messages cross: no tensor is ever pickled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType

from marl_collect.description import EnvDescription, Fields
from marl_collect.factories import Factory
from marl_collect.layout import Layout
from marl_collect.rollout import Episode, Plan
from marl_collect.skeleton import Skeleton
from marl_collect.weights import WeightLayout, WeightsHandle


@dataclass(frozen=True)
class Assignment:
    """What a worker is started with.

    Attributes:
        factories: one per environment of the worker.
        plan: seed, environments' indices, trajectory limit.
        exploration: how the policy chooses.
        num_threads: torch threads.
        init_fn: called first.
    """

    factories: tuple[Factory, ...]
    plan: Plan
    exploration: InteractionType
    num_threads: int
    init_fn: Callable[[], Any] | None


@dataclass(frozen=True)
class Ready:
    """The environments are built."""

    description: EnvDescription


@dataclass(frozen=True)
class RandomActions:
    """Act at random."""


@dataclass(frozen=True)
class SkeletonPolicy:
    """Act with this module, whose weights come by UseWeights."""

    skeleton: Skeleton
    layout: WeightLayout


@dataclass(frozen=True)
class CallablePolicy:
    """Act with this callable, which has no weights; or with what it builds."""

    policy: Callable[..., Any]
    builds: bool


@dataclass(frozen=True)
class PolicyReady:
    """The policy acted once, on a fake frame.

    Attributes:
        outputs: what it writes at the root.
        carried: its hidden states.
        reads_is_init: whether it reads ``is_init``.
        layout: of its weights, None if it has none.
    """

    outputs: Fields
    carried: Fields
    reads_is_init: bool
    layout: WeightLayout | None


@dataclass(frozen=True)
class UseWeights:
    """Read weights from here on from this shared memory.

    Attributes:
        handle: of the memory.
        publish: write the policy's own weights there first, as version 0.
    """

    handle: WeightsHandle
    publish: bool = False


@dataclass(frozen=True)
class UseSlot:
    """Map the memory of a slot; the worker's rows are those of its environments."""

    slot: int
    path: str
    layout: Layout


@dataclass(frozen=True)
class Attached:
    """The memory is mapped."""


@dataclass(frozen=True)
class Collect:
    """Fill the worker's rows of a slot.

    Attributes:
        slot: index of the slot.
        version: of the weights to act with.
        random: act at random.
        reset: begin new episodes first.
    """

    slot: int
    version: int
    random: bool = False
    reset: bool = False


@dataclass(frozen=True)
class Collected:
    """The rows are filled, by this version of the weights."""

    version: int
    episodes: tuple[Episode, ...]
