"""Converts the user's arguments into one ``Spec`` per actor."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import cloudpickle
from torch import nn

from marl_collect.collectors.multi_sync import SyncBackend
from marl_collect.collectors.shared_weights import factories_of
from marl_collect.collectors.single import SingleBackend
from marl_collect.core.factories import Factory, spread
from marl_collect.distributed.messages import Sent, Spec, Weightless
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.weights.shared import WeightLayout
from marl_collect.weights.skeleton import split_module

Dealt = list[list[Factory]]


@final
class Specs:
    """Builds the spec of each actor.

    Attributes:
        factories: of the environments of each initial actor.
        workers: number of workers of each actor.
    """

    def __init__(
        self,
        create_env_fn: Factory | Sequence[Factory],
        options: RayOptions,
    ) -> None:
        """Distribute the factories over actors.

        Raises:
            TypeError: if an argument is not a factory.
            ValueError: if the length of a list does not fit.
        """
        self._options = options
        self.workers = options.num_workers_per_collector
        self._create_env_fn = create_env_fn
        self.factories = self._deal(create_env_fn, options.num_collectors)
        self.policy: Any = None
        self._builders = factories_of(options, len(self.factories) * self.workers)
        if not isinstance(options.frames_per_batch, int):
            options.frames_of([1] * len(self.factories))  # Does the list fit?

    @property
    def population(self) -> bool:
        """Whether every worker's policy is built by a factory of its own."""
        return isinstance(self._options.policy_factory, Sequence)

    @property
    def first_factory(self) -> Factory:
        """The factory of the first environment."""
        return self.factories[0][0]

    def use_policy(self, policy: Any) -> WeightLayout | None:
        """Send this policy to all actors; return the layout of its weights, if any."""
        self.policy = policy
        if not isinstance(policy, nn.Module):
            return None
        layout = WeightLayout.of(policy)
        self.policy = Weightless(split_module(policy), layout)
        return layout

    def more(self, create_env_fn: Any, count: int) -> Dealt:
        """Return the factories of further actors.

        Raises:
            ValueError: if there is no factory for them.
        """
        source = self._create_env_fn if create_env_fn is None else create_env_fn
        if create_env_fn is None and isinstance(source, Sequence):
            raise ValueError(
                "create_env_fn was a list, so there are no factories for new actors: "
                "pass them, add_collectors(count, create_env_fn=[...])."
            )
        return self._deal(source, count)

    def spec(self, index: int, factories: Sequence[Factory], seed: int) -> Spec:
        """Return the spec of an actor.

        Args:
            index: of the actor.
            factories: of its environments.
            seed: of the collector.
        """
        options = self._options
        first = index * self.workers
        keywords = options.sent() | {
            "seed": seed,
            "frames_per_batch": self._frames(index),
        }
        if options.policy_factory is not None:
            keywords["policy_factory"] = self._builder(first)
        devices = [
            str(options.policy_device_of(first + w)) for w in range(self.workers)
        ]
        keywords["policy_device"] = devices
        if options.has_workers:
            keywords["num_workers"] = self.workers
            keywords["envs_per_worker"] = len(factories) // self.workers
        return Spec(
            kind=SyncBackend if options.has_workers else SingleBackend,
            factories=tuple(factories),
            policy=self.policy if options.policy_factory is None else None,
            keywords=keywords,
            worker=first,
            place=None,
            seed=(seed, index * len(factories)),
            who=f"actor {index}",
        )

    def _frames(self, index: int) -> int:
        asked = self._options.frames_per_batch
        if not isinstance(asked, int):
            return asked[index % len(asked)]
        if not self._options.sync:
            return asked
        # The actor rounds up again, to the same result if all have equal sizes.
        return -(-asked // len(self.factories))

    def _builder(self, first: int) -> Any:
        factory = self._options.policy_factory
        if not isinstance(factory, Sequence):
            return factory
        if first + self.workers > len(factory):
            raise ValueError(
                "policy_factory is a list with one entry for each initial worker, so "
                "there is none for new actors: pass a single factory instead."
            )
        own: list[Callable[[], Any]] = list(factory[first : first + self.workers])
        return own

    def _deal(self, create_env_fn: Any, count: int | None) -> Dealt:
        listed = isinstance(create_env_fn, Sequence)
        if listed and count is None:
            count = max(1, len(create_env_fn) // self.workers)
        count = count or 1
        if listed and len(create_env_fn) == count:
            # One factory per actor, used by all of its workers.
            create_env_fn = [f for f in create_env_fn for _ in range(self.workers)]
        options = self._options
        own = spread(
            create_env_fn,
            count * self.workers,
            options.envs_per_worker,
            options.create_env_kwargs,
        )
        each = self.workers
        return [
            [factory for worker in own[a * each : (a + 1) * each] for factory in worker]
            for a in range(count)
        ]


def packed(content: Any, who: str) -> Sent:
    """Pickle what an actor is sent.

    Raises:
        TypeError: if it cannot be pickled.
    """
    try:
        return Sent(cloudpickle.dumps(content), tuple(sys.path))
    except Exception as error:
        raise TypeError(
            f"The environments or the policy of {who} cannot be pickled "
            f"({type(error).__name__}: {error}). Pass factories that build them in the "
            "actor, and create there what cannot be pickled."
        ) from error


def in_place(spec: Spec, seed: int, **changes: Any) -> Spec:
    """Return the spec of an actor that replaces another one."""
    keywords = {**spec.keywords, "seed": seed}
    return replace(spec, keywords=keywords, seed=(seed, spec.seed[1]), **changes)
