"""Messages between the trainer and its actors, through Ray.

    trainer                                      actor
    start(Spec, weights) -------------------->   build the collector
                         <--------------------   ActorReady
    order(Order, weights) ------------------->   broadcast them to its workers, collect
                         <--------------------   Gathered: one array of bytes
    ask(name, ...) -------------------------->   call that method of the collector
                         <--------------------   ActorAnswer

Weights are passed by reference: they are put into the object store once, and each node
fetches them once. An exception in an actor is returned as ``Failed``.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import Layout
from marl_collect.collectors.backend import HostedBackend, Placement
from marl_collect.collectors.options import CollectorArguments
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.factories import Factory
from marl_collect.errors import Failure
from marl_collect.rollout.episodes import Episode
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import WeightLayout
from marl_collect.weights.skeleton import Skeleton

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Weightless:
    """A module without its weights.

    Attributes:
        skeleton: the module.
        layout: of the vector that holds its weights.
    """

    skeleton: Skeleton
    layout: WeightLayout


@dataclass(frozen=True)
class Spec:
    """What an actor builds; sent by cloudpickle.

    Attributes:
        kind: which backend it runs.
        factories: of the environments, worker by worker.
        policy: a callable, None for random actions, or a module without weights.
        keywords: of the collector.
        worker: index of its first worker, over all actors.
        place: of its environments; None if it is sent later.
        seed: of torch's own generator, with the index of an environment.
        who: name of the actor in error messages.
    """

    kind: Callable[[CollectorArguments], HostedBackend]
    factories: Sequence[Factory]
    policy: Any
    keywords: Mapping[str, Any]
    worker: int
    place: Placement | None
    seed: tuple[int, int]
    who: str


@dataclass(frozen=True)
class Sent:
    """A pickled object of the user, sent to an actor.

    Attributes:
        pickled: the object, by cloudpickle.
        path: the trainer's ``sys.path``.
    """

    pickled: bytes
    path: tuple[str, ...]


@dataclass(frozen=True)
class ActorReady:
    """A collector is built.

    Attributes:
        description: of its environments.
        layout: of the bytes that it sends.
        sizes: environments of each of its workers.
        pid: of the actor.
        node: Ray's id of the node that it is on.
        host: name of the machine.
    """

    description: EnvDescription
    layout: Layout
    sizes: tuple[int, ...]
    pid: int
    node: str
    host: str


@dataclass(frozen=True)
class Order:
    """Collect one batch.

    Attributes:
        number: of the order, counting up.
        random: act at random.
        snapshot: keep the state before it until the next order.
        weights: for each set of weights: the workers that it is for (None for all),
            changed settings of the policy, and which tensors have changed. For each
            range of these one array of bytes is sent with the order.
    """

    number: int
    random: bool
    snapshot: bool
    weights: tuple[
        tuple[tuple[int, ...] | None, Settings | None, tuple[range, ...]], ...
    ] = ()


@dataclass(frozen=True)
class Last:
    """Observations that ``compact_obs`` stores apart; see ``LastObservations``."""

    rows: NDArray[np.int64]
    frames: NDArray[np.int64]
    observations: Mapping[Key, NDArray[Any]]


@dataclass(frozen=True)
class Gathered:
    """The result of an order.

    Attributes:
        content: the filled slot, in the layout of ActorReady.
        ends: valid frames of each environment.
        episodes: that ended.
        running: number of each environment's running episode.
        last: what ``compact_obs`` stores apart.
        metrics: the collector's counters so far.
    """

    content: Bytes
    ends: tuple[int, ...]
    episodes: tuple[Episode, ...]
    running: tuple[int, ...]
    last: Last | None
    metrics: Mapping[str, Any]

    def without_content(self) -> "Gathered":
        """Return a copy without the bytes, so that the object store can drop them."""
        return replace(self, content=np.empty(0, np.uint8))


@dataclass(frozen=True)
class ActorAnswer:
    """What a method of the actor's collector returned.

    Pickled here and not by Ray: arrays in Ray's store are read-only, and occupy it for
    as long as they are held.
    """

    pickled: bytes

    @classmethod
    def of(cls, value: Any = None) -> "ActorAnswer":
        """Pack a value."""
        return cls(cloudpickle.dumps(value))

    @property
    def value(self) -> Any:
        """The value, in the trainer's own memory."""
        return pickle.loads(self.pickled)


def whole(layout: WeightLayout, parts: Sequence[Bytes]) -> torch.Tensor:
    """Return a new vector of weights, uint8 ``[nbytes]``, from all of its parts."""
    vector = np.zeros(layout.nbytes, np.uint8)
    if parts:
        np.concatenate(parts, out=vector)
    return torch.from_numpy(vector)


@dataclass(frozen=True)
class Failed:
    """An exception that was raised in an actor.

    Attributes:
        failure: the exception.
        worker: the worker that raised it, numbered over all actors.
    """

    failure: Failure
    worker: int
