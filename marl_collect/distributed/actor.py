"""What runs in an actor: one of our collectors, driven by a trainer elsewhere.

Two threads: one carries out what the trainer orders, one after the other; the other
answers meanwhile how far that has come, and can cut it short. Nothing is raised through
Ray, which would wrap it: what goes wrong is returned.
"""

import os
import pickle
import platform
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, final

import torch
from torch import nn

from marl_collect.buffers.compact_observations import LastObservations
from marl_collect.collectors.assigning import seed_torch
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.remote import Driven, Place
from marl_collect.collectors.single import Collector
from marl_collect.distributed.messages import (
    Answer,
    Bytes,
    Failed,
    Gathered,
    Last,
    Order,
    Ready,
    Sent,
    Spec,
    Weightless,
)
from marl_collect.errors import Failure, WorkerError, worker_error_of
from marl_collect.parallel_env.describe import describe
from marl_collect.processes import import_guard
from marl_collect.weights.module_settings import Path, apply_settings
from marl_collect.weights.shared import WeightLayout
from marl_collect.weights.skeleton import put_together

_AGAIN = 0.05  # Seconds between two requests to end a rollout.
P = ParamSpec("P")


def _returns_failures(
    method: Callable[Concatenate["Actor", P], Any],
) -> Any:
    """Return what a method raises, and from then on for every other call, too."""

    @wraps(method)
    def call(self: "Actor", *args: P.args, **kwargs: P.kwargs) -> Any:
        if self.failed is None:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the trainer raises it
                self.failed = self.pack(error)
        return self.failed

    return call


@final
class Actor:
    """A node's collector. Built empty, so that its process says who it is.

    Attributes:
        failed: what went wrong first; nothing is carried out after that.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.failed: Failed | None = None
        self._spec: Spec | None = None
        self._driven: Driven | None = None
        self._collector: Any = None
        self._weights: WeightLayout | None = None
        self._module: nn.Module | None = None
        self._settings: dict[Path, Any] = {}
        self._before: list[Any] = []
        self._state = threading.Condition()
        self._number = -1  # Of the order that is being carried out, -1 for none.
        self._done = -1  # Number of the order that was carried out last.

    # Work

    @_returns_failures
    def start(self, sent: Sent, *weights: Bytes) -> Ready:
        """Build the collector.

        Args:
            sent: a Spec.
            weights: those of its module, if it has one.
        """
        spec: Spec = _unpickled(sent)
        self._spec = spec
        policy = spec.policy
        if isinstance(policy, Weightless):
            self._weights = policy.layout
            vector = torch.from_numpy(weights[0].copy())
            policy = put_together(policy.skeleton, policy.layout.views(vector))
            self._module = policy
        generation = spec.place.generation if spec.place else 0
        if spec.kind is Collector:
            torch.set_num_threads(spec.keywords["num_sub_threads"])
            seed_torch(*spec.seed, generation)
        self._collector = spec.kind(list(spec.factories), policy, **spec.keywords)
        driven: Driven = self._collector.driven()
        self._driven = driven
        if spec.place is not None:
            self._take_place(spec.place)
        return Ready(
            description=self._collector.description,
            layout=driven.layout,
            sizes=tuple(driven.sizes),
            pid=os.getpid(),
            node=_node(),
            host=platform.node(),
        )

    @_returns_failures
    def order(self, order: Order, *weights: Bytes) -> Gathered:
        """Collect one batch, with these weights if they are new."""
        driven = self._ready()
        self._publish(order, weights)
        if order.snapshot:
            self._before = driven.states()
        with self._state:
            self._number = order.number
            self._state.notify_all()
        try:
            filled = driven.collect(random=order.random)
        finally:
            with self._state:
                self._number, self._done = -1, order.number
                self._state.notify_all()
        return Gathered(
            content=_bytes_of(filled),
            ends=tuple(filled.ends),
            episodes=tuple(filled.episodes),
            running=driven.running(),
            last=_last_of(filled.last),
            figures=driven.figures(),
        )

    @_returns_failures
    def ask(self, name: str, *args: Any) -> Answer:
        """Call a part of Driven by its name, and return what it returns."""
        return Answer.of(getattr(self._ready(), name)(*args))

    @_returns_failures
    def place(self, place: Place) -> Answer:
        """Number the environments, before anything is collected."""
        self._take_place(place)
        return Answer.of()

    @_returns_failures
    def reseed(self, seed: int) -> Answer:
        """Derive everything random from ``seed``, and begin new episodes."""
        driven = self._ready()
        driven.reseed(seed)
        self._seed_torch(seed, 0)
        return Answer.of()

    @_returns_failures
    def attribute(self, owner: str, name: str) -> Answer:
        """Return an attribute of every worker's, or the error that there is none."""
        try:
            return Answer.of(self._ready().attribute(owner, name))
        except AttributeError as error:
            return Answer.of(error)  # The asker's error, not this actor's.

    @_returns_failures
    def states(self, before: bool) -> Answer:  # noqa: FBT001 - by position, as Ray's
        """Return the collector's states, now or before the last order."""
        return Answer.of(self._before if before else self._ready().states())

    @_returns_failures
    def vectors(self) -> Answer:
        """Return the layout of the weights, and each worker's as a vector."""
        found = self._ready().weights()
        if not found:
            return Answer.of((None, []))
        layout = WeightLayout.plan(found[0])
        vectors: list[Bytes] = []
        for tensors in found:
            vector = torch.zeros(layout.nbytes, dtype=torch.uint8)
            views = layout.views(vector)
            with torch.no_grad():
                torch._foreach_copy_(views, [t.detach() for t in tensors.values()])
            vectors.append(vector.numpy())
        return Answer.of((layout, vectors))

    @_returns_failures
    def describe(self, sent: Sent) -> Answer:
        """Describe the environment that a factory builds, without keeping it."""
        return Answer.of(describe(_unpickled(sent)))

    def close(self) -> None:
        """End the collector."""
        if self._collector is not None:
            self._collector.shutdown()

    # Meanwhile

    def steps(self) -> int:
        """Return the frames so far, also of a batch in the making."""
        return 0 if self._driven is None else self._driven.steps()

    def preempt(self, number: int) -> None:
        """Cut an order short, now or once it begins, and wait until it has ended."""
        with self._state:
            while self._done < number and self.failed is None:
                # Again and again: a rollout that is only just beginning forgets it.
                if self._number == number:
                    self._ready().preempt()
                self._state.wait(_AGAIN)

    # Inside

    def pack(self, error: Exception) -> Failed:
        """Return an exception with the place where it was raised."""
        spec = self._spec
        worker = spec.worker if spec else 0
        cause = worker_error_of(error)
        if cause is not None:
            worker += cause.worker
        if isinstance(error, WorkerError):
            error = _numbered(error, worker)
        if spec is not None:
            error.add_note(f"Raised in {spec.who} on {platform.node()}.")
        place = cause or WorkerError(worker, pid=os.getpid())
        failure = Failure.capture(error, place.pid, place.phase, place.environment)
        return Failed(failure, worker)

    def _ready(self) -> Driven:
        assert self._driven is not None, "start() comes first."
        return self._driven

    def _take_place(self, place: Place) -> None:
        self._ready().place(place)
        assert self._spec is not None
        self._seed_torch(self._spec.seed[0], place.first, place.generation)

    def _seed_torch(self, seed: int, first: int, generation: int = 0) -> None:
        """Where no worker does it, let draws of the user's own modules repeat."""
        if self._spec is not None and self._spec.kind is Collector:
            seed_torch(seed, first, generation)

    def _publish(self, order: Order, weights: tuple[Bytes, ...]) -> None:
        for (workers, settings), content in zip(order.weights, weights, strict=True):
            if settings is not None and self._module is not None:
                # The collector here finds the changes, as it would a user's.
                apply_settings(self._module, settings, self._settings)
            if self._weights is None:  # A factory built the policy here.
                self._weights = WeightLayout.plan(self._ready().weights()[0])
            views = self._weights.views(torch.from_numpy(content.copy()))
            self._ready().publish(views, workers)


def _unpickled(sent: Sent) -> Any:
    """Return what was sent; modules are found where the trainer finds them."""
    known = set(sys.path)
    sys.path += [at for at in sent.path if at not in known and os.path.isdir(at)]
    with import_guard.unpickling("its factories and its policy"):
        return pickle.loads(sent.pickled)


def _node() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def _bytes_of(filled: Filled) -> Bytes:
    """Return a filled slot as it stands in memory; Ray copies it into its store."""
    storage = next(iter(filled.tensors.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    array: Bytes = whole.numpy()
    return array


def _last_of(last: LastObservations | None) -> Last | None:
    if last is None:
        return None
    observations = {key: kept.numpy() for key, kept in last.observations.items()}
    return Last(last.rows.numpy(), last.frames.numpy(), observations)


def _numbered(error: WorkerError, worker: int) -> WorkerError:
    """Return an error of a worker with its number over all actors."""
    numbered = WorkerError(worker, *error.args[1:])
    numbered.__cause__ = error.__cause__
    numbered.__traceback__ = error.__traceback__
    for note in getattr(error, "__notes__", ()):
        numbered.add_note(note)
    return numbered
