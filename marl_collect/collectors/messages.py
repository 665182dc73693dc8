"""What a collector and its workers send each other.

    trainer                                       worker
    Assignment (at the start) ----------->  build the environments
                            <-------------------  their description and number
    ("prepare", (plan, policy)) --------------->  build the policy, call it
                            <-------------------  Prepared
    ("publish_weights", ...) ------------------>  publish the weights of a factory
                            <-------------------  None
    ("use_slot", ...) ------------------------->  map a slot
                            <-------------------  None
    ("collect", (Collect(slot), Weights, level))  >  fill the slot's rows
                            <-------------------  Collected

A ``Call`` names a method of ``RolloutWorker``. Every call has one reply: what the
method returns. Replies arrive in the order of the calls. After ``use_slot`` all
messages are small: batches and weights are never pickled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marl_collect.core.factories import Factory
from marl_collect.core.signature import PolicySignature
from marl_collect.policies.choose import ActingOptions
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.sending import State
from marl_collect.weights.skeleton import Skeleton


@dataclass(frozen=True)
class Assignment:
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
class SkeletonPolicy:
    """Act with this module, on shared weights.

    Attributes:
        skeleton: the module without its weights.
        layout: of the weights.
        handle: of their memory.
        weights_slot: of the initial weights.
    """

    skeleton: Skeleton
    layout: WeightLayout
    handle: Any
    weights_slot: int


@dataclass(frozen=True)
class FactoryPolicy:
    """Act with the policy that a factory builds.

    Attributes:
        factory: builds the policy.
        index: of the factory in a list; 0 if all workers have the same factory.
        trust: call the policy on TensorDicts without inspecting its arguments.
        follows: structure of the trainer's policy, whose changes outside of weights it
            gets; None if there is none.
    """

    factory: Callable[[], Any]
    index: int
    trust: bool
    follows: Mapping[str, str] | None


Prepared = tuple[PolicySignature, WeightLayout | None, str]
"""The policy's keys, the layout of its weights if it has any, and how it runs."""


@dataclass(frozen=True)
class Weights:
    """Act with these weights.

    Attributes:
        order: a unique number, which the worker records once it has read the weights.
        version: of the weights.
        weights_slot: number of the slot to read; None if the worker has the weights.
        handle: of this slot, unless the worker has it.
        state: of the policy, if it has changed.
    """

    order: int = 0
    version: int = 0
    weights_slot: int | None = None
    handle: Any = None
    state: State | None = None


@dataclass(frozen=True)
class Collect:
    """Fill the worker's rows of a slot.

    Attributes:
        slot: number of the slot.
        random: act at random.
        reset: begin new episodes first.
        mark: keep the state before this rollout until the next one.
        vacant: numbers of slots whose memory the trainer has freed.
    """

    slot: int
    random: bool = False
    reset: bool = False
    mark: bool = False
    vacant: tuple[int, ...] = ()
