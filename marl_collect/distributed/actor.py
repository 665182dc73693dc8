"""Runs in an actor: a local collector that the trainer controls remotely.

One thread carries out the trainer's orders, one after the other. Others report progress
meanwhile and can preempt an order. Exceptions are returned, not raised, because Ray
would wrap them.
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
from marl_collect.collectors.backend import Filled, HostedBackend, Placement
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.single import SingleBackend
from marl_collect.distributed.messages import (
    ActorAnswer,
    ActorReady,
    Bytes,
    Failed,
    Gathered,
    Last,
    Order,
    Sent,
    Spec,
    Weightless,
    whole,
)
from marl_collect.errors import Failure, WorkerError, worker_error_of
from marl_collect.parallel_env.describe import describe
from marl_collect.processes import import_guard
from marl_collect.weights.module_settings import Path, apply_settings
from marl_collect.weights.shared import WeightLayout
from marl_collect.weights.skeleton import assemble_module

_CLOSE_SECONDS = 10.0
_AGAIN = 0.05  # Seconds between two requests to end a rollout.
P = ParamSpec("P")


def _returns_failures(
    method: Callable[Concatenate["Actor", P], Any],
) -> Any:
    """Make a method return its exception; all later calls return it too."""

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
    """A collector on a node. Built empty: ``start`` builds the collector.

    Attributes:
        failed: the first failure; nothing is carried out after it.
    """

    def __init__(self) -> None:
        """Create an actor without a collector."""
        self.failed: Failed | None = None
        self._spec: Spec | None = None
        self._backend: HostedBackend | None = None
        self._weights: WeightLayout | None = None
        self._module: nn.Module | None = None
        self._received: list[torch.Tensor] = []
        self._settings: dict[Path, Any] = {}
        self._before: list[Any] = []
        self._state = threading.Condition()
        self._number = -1  # Of the current order; -1 for none.
        self._done = -1  # Number of the last completed order.

    # Work

    @_returns_failures
    def start(self, sent: Sent, *weights: Bytes) -> ActorReady:
        """Build the collector.

        Args:
            sent: a pickled ``Spec``.
            weights: of its module, if it has one, part by part.
        """
        spec: Spec = _unpickled(sent)
        self._spec = spec
        policy = spec.policy
        if isinstance(policy, Weightless):
            self._weights = policy.layout
            vector = whole(policy.layout, weights)
            if spec.kind is SingleBackend:
                # The policy that acts here may write its own tensors. An update also
                # resets parts that are not sent again.
                self._received = policy.layout.views(vector.clone())
            policy = assemble_module(policy.skeleton, policy.layout.views(vector))
            self._module = policy
        generation = spec.place.generation if spec.place else 0
        if spec.kind is SingleBackend:
            torch.set_num_threads(spec.keywords["num_sub_threads"])
            seed_torch(*spec.seed, generation)
        arguments = CollectorArguments(list(spec.factories), policy, **spec.keywords)
        self._backend = backend = spec.kind(arguments)
        if spec.place is not None:
            self._take_place(spec.place)
        return ActorReady(
            description=backend.description,
            layout=backend.layout,
            sizes=tuple(backend.sizes),
            pid=os.getpid(),
            node=_node(),
            host=platform.node(),
        )

    @_returns_failures
    def order(self, order: Order, *weights: Bytes) -> Gathered:
        """Collect one batch, after setting the weights if new ones are given."""
        backend = self._ready()
        self._publish(order, weights)
        if order.snapshot:
            self._before = backend.states()
        with self._state:
            self._number = order.number
            self._state.notify_all()
        try:
            filled = backend.collect(random=order.random, delivered=0)
        finally:
            with self._state:
                self._number, self._done = -1, order.number
                self._state.notify_all()
        return Gathered(
            content=_bytes_of(filled),
            ends=tuple(filled.ends),
            episodes=tuple(filled.episodes),
            running=backend.running,
            last=_last_of(filled.last),
            metrics=backend.metrics(),
        )

    @_returns_failures
    def ask(self, name: str, *args: Any) -> ActorAnswer:
        """Call a method of the collector's ``Backend`` by name."""
        return ActorAnswer.of(getattr(self._ready(), name)(*args))

    @_returns_failures
    def place(self, place: Placement) -> ActorAnswer:
        """Number the environments, before the first batch."""
        self._take_place(place)
        return ActorAnswer.of()

    @_returns_failures
    def reseed(self, seed: int) -> ActorAnswer:
        """Derive all randomness from ``seed``, and begin new episodes."""
        backend = self._ready()
        backend.reseed(seed)
        self._seed_torch(seed, 0)
        return ActorAnswer.of()

    @_returns_failures
    def attribute(self, owner: str, name: str) -> ActorAnswer:
        """Return an attribute of every worker, or the ``AttributeError``."""
        try:
            return ActorAnswer.of(self._ready().attribute(owner, name))
        except AttributeError as error:
            return ActorAnswer.of(error)  # A wrong name is not a failure of this actor.

    @_returns_failures
    def states(self, before: bool) -> ActorAnswer:  # noqa: FBT001 - by position, as Ray's
        """Return the collector's states, now or as before the last order."""
        return ActorAnswer.of(self._before if before else self._ready().states())

    @_returns_failures
    def vectors(self) -> ActorAnswer:
        """Return the layout of the weights, and each worker's weights as a vector."""
        found = self._ready().worker_weights()
        if not found:
            return ActorAnswer.of((None, []))
        layout = WeightLayout.plan(found[0])
        vectors: list[Bytes] = []
        for tensors in found:
            vector = torch.zeros(layout.nbytes, dtype=torch.uint8)
            views = layout.views(vector)
            with torch.no_grad():
                torch._foreach_copy_(views, [t.detach() for t in tensors.values()])
            vectors.append(vector.numpy())
        return ActorAnswer.of((layout, vectors))

    @_returns_failures
    def describe(self, sent: Sent) -> ActorAnswer:
        """Return the description of the environment that a factory builds."""
        return ActorAnswer.of(describe(_unpickled(sent)))

    def close(self) -> None:
        """Release everything that the collector has."""
        if self._backend is not None:
            self._backend.close(_CLOSE_SECONDS)

    # While an order runs

    def steps(self) -> int:
        """Return the frames so far, including a batch in progress."""
        return 0 if self._backend is None else self._backend.steps()

    def preempt(self, number: int) -> None:
        """Preempt an order, now or when it begins, and wait until it has ended."""
        with self._state:
            while self._done < number and self.failed is None:
                # Repeated, because a rollout that is just beginning drops the request.
                if self._number == number:
                    self._ready().preempt()
                self._state.wait(_AGAIN)

    # Inside

    def pack(self, error: Exception) -> Failed:
        """Pack an exception, with the actor and worker that raised it."""
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

    def _ready(self) -> HostedBackend:
        assert self._backend is not None, "Call start() first."
        return self._backend

    def _take_place(self, place: Placement) -> None:
        self._ready().place(place)
        assert self._spec is not None
        self._seed_torch(self._spec.seed[0], place.first, place.generation)

    def _seed_torch(self, seed: int, first: int, generation: int = 0) -> None:
        """Seed torch in this process if the collector has no workers that do."""
        if self._spec is not None and self._spec.kind is SingleBackend:
            seed_torch(seed, first, generation)

    def _publish(self, order: Order, weights: tuple[Bytes, ...]) -> None:
        contents = iter(weights)
        for workers, settings, parts in order.weights:
            if settings is not None and self._module is not None:
                # The collector detects these changes like those of a user.
                apply_settings(self._module, settings, self._settings)
            current = self._ready().worker_weights() or [{}]
            if self._weights is None:  # A factory built the policy here.
                self._weights = WeightLayout.plan(current[0])
            live = current[workers[0] if workers else 0]
            tensors = self._received or list(live.values())
            for part in parts:
                vector = torch.from_numpy(next(contents).copy())
                tensors[part.start : part.stop] = self._weights.part(part).views(vector)
            self._ready().weights.publish(tensors, workers)


def _unpickled(sent: Sent) -> Any:
    """Unpickle what was sent, with the trainer's module search path."""
    known = set(sys.path)
    sys.path += [at for at in sent.path if at not in known and os.path.isdir(at)]
    with import_guard.unpickling("its factories and its policy"):
        return pickle.loads(sent.pickled)


def _node() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def _bytes_of(filled: Filled) -> Bytes:
    """Return the memory of a filled slot; Ray copies it into its store."""
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
    """Return a worker's error with the worker's number over all actors."""
    numbered = WorkerError(worker, *error.args[1:])
    numbered.__cause__ = error.__cause__
    numbered.__traceback__ = error.__traceback__
    for note in getattr(error, "__notes__", ()):
        numbered.add_note(note)
    return numbered
