"""What crosses between the trainer and its actors, through Ray.

    trainer                                      actor
    start(Spec, weights) -------------------->   build the collector
                         <--------------------   Ready
    order(Order, weights) ------------------->   publish them in the node, collect
                         <--------------------   Gathered: one array of bytes
    ask(name, ...) -------------------------->   call that part of RemoteCollector
                         <--------------------   Answer

Weights are arguments by reference: they are put into the object store once, and a node
fetches them once. Whatever goes wrong in an actor comes back as Failed.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import Layout
from marl_collect.collectors.remote import Placement
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
        layout: where in a vector its weights stand.
    """

    skeleton: Skeleton
    layout: WeightLayout


@dataclass(frozen=True)
class Spec:
    """What an actor builds; travels by cloudpickle.

    Attributes:
        kind: class of the collector.
        factories: of the environments, worker by worker.
        policy: a callable, None for random actions, or a module without weights.
        keywords: of the collector.
        worker: index of its first worker, over all actors.
        place: of its environments; None if that is said later.
        seed: of torch's own generator, with the index of an environment.
        who: the actor, for messages.
    """

    kind: Callable[..., Any]
    factories: Sequence[Factory]
    policy: Any
    keywords: Mapping[str, Any]
    worker: int
    place: Placement | None
    seed: tuple[int, int]
    who: str


@dataclass(frozen=True)
class Sent:
    """Something of the user's on its way to an actor.

    Attributes:
        pickled: by cloudpickle.
        path: the trainer's ``sys.path``.
    """

    pickled: bytes
    path: tuple[str, ...]


@dataclass(frozen=True)
class Ready:
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
        snapshot: keep the state before it, until the next order.
        weights: for each array that comes along, the workers that it is for, None
            for all, and changed settings of the policy.
    """

    number: int
    random: bool
    snapshot: bool
    weights: tuple[tuple[tuple[int, ...] | None, Settings | None], ...] = ()


@dataclass(frozen=True)
class Last:
    """Observations that ``compact_obs`` keeps apart; see ``LastObservations``."""

    rows: NDArray[np.int64]
    frames: NDArray[np.int64]
    observations: Mapping[Key, NDArray[Any]]


@dataclass(frozen=True)
class Gathered:
    """An order is carried out.

    Attributes:
        content: the filled slot, in the layout of Ready.
        ends: valid frames of each environment.
        episodes: that ended.
        running: number of each environment's running episode.
        last: what ``compact_obs`` keeps apart.
        figures: the collector's counters so far.
    """

    content: Bytes
    ends: tuple[int, ...]
    episodes: tuple[Episode, ...]
    running: tuple[int, ...]
    last: Last | None
    figures: Mapping[str, Any]

    def without_content(self) -> "Gathered":
        """Return all but the bytes, which a store then need not keep."""
        return replace(self, content=np.empty(0, np.uint8))


@dataclass(frozen=True)
class Answer:
    """What a part of the collector returned.

    Pickled here and not by Ray: arrays in its store are read-only, and stay there for
    as long as anybody holds them.
    """

    pickled: bytes

    @classmethod
    def of(cls, value: Any = None) -> "Answer":
        """Pack a value."""
        return cls(cloudpickle.dumps(value))

    @property
    def value(self) -> Any:
        """The value, as the trainer's own."""
        return pickle.loads(self.pickled)


@dataclass(frozen=True)
class Failed:
    """What went wrong.

    Attributes:
        failure: the exception.
        worker: in which it was raised, over all actors.
    """

    failure: Failure
    worker: int
