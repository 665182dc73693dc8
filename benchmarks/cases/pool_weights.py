"""What an update costs while a pool keeps past versions of the policy.

The policy has 76,040 parameters, which change before every update; a version is kept
every ten updates. An update is published by the trainer and pulled by a worker. The
versions are frozen, so they travel once; in the alternative "all" they are not frozen
and travel with every update. The size is the mean of an update.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from harness.turns import Alternative
from torch import nn

from cases.case import Case
from marl_collect.collectors.broadcaster import SharedVector
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.pool import PolicyPool
from marl_collect.weights.layout import WeightLayout, lacking
from marl_collect.weights.shared import PLACES, WeightPublisher
from marl_collect.weights.skeleton import weight_tensors

MEMBERS = (1, 8, 32)
EVERY = 10


class Updates:
    """Updates of a policy and its pool, step by step."""

    def __init__(self, members: int, *, frozen: bool) -> None:
        """Send everything to each place once; later updates send what has changed."""
        self._policy = nn.Sequential(
            nn.Linear(31, 256), nn.Linear(256, 256), nn.Linear(256, 8)
        )
        self._pool = PolicyPool(self._policy, size=members, every=EVERY)
        self._pool.members.requires_grad_(not frozen)
        policies = {"main": self._policy, "past": self._pool}
        assigned = AssignedPolicies(policies, lambda *_: {})
        self._tensors = list(weight_tensors(assigned).values())
        layout = WeightLayout.of(assigned, assigned.owner)
        self._sizes_of = [span.end - span.begin for span in layout.ranges]
        self._publisher = WeightPublisher(layout)
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._reader = self._publisher.handle.attach(memory)
        self._vector = SharedVector(self._publisher, layout, itertools.count())
        self._pulled: tuple[int, ...] = ()
        for _ in range(PLACES):
            self.learn()
            self.publish()
            self.pull()
        self._sizes: list[int] = []

    def learn(self) -> None:
        """Change the parameters, and keep a version every ten updates."""
        with torch.no_grad():
            for parameter in self._policy.parameters():
                parameter.add_(1e-3)
        self._pool.update()

    def publish(self) -> Sequence[int]:
        """Write what has changed; return the indices of its ranges."""
        replaced = self._vector.replaced
        self._vector.write(self._tensors, 0, None)
        numbers = self._vector.newest.numbers
        return lacking(numbers, replaced.numbers if replaced else ())

    def pull(self) -> Sequence[int]:
        """Read what has changed; return the indices of its ranges."""
        newest = self._vector.newest
        ranges = lacking(newest.numbers, self._pulled)
        self._reader.pull(newest.place, ranges)
        self._pulled = newest.numbers
        return ranges

    def publish_next(self) -> None:
        """Learn and publish, so that there is something to pull."""
        self.learn()
        self.publish()

    def counted(self, send: Callable[[], Sequence[int]]) -> Alternative:
        """Return the alternative of publishing or of pulling."""

        def call() -> float:
            self._sizes.append(sum(self._sizes_of[number] for number in send()))
            return 1.0

        prepare = self.learn if send == self.publish else self.publish_next
        return Alternative(call, prepare, lambda: statistics.mean(self._sizes))

    def close(self) -> None:
        """Free the shared memory."""
        self._publisher.close()


def build(stack: ExitStack, step: str, members: int) -> dict[str, Alternative]:
    """Return updates of a pool whose versions are frozen, and of one that sends all."""
    alternatives = {}
    for name, frozen in (("changed", True), ("all", False)):
        updates = Updates(members, frozen=frozen)
        stack.callback(updates.close)
        alternatives[name] = updates.counted(getattr(updates, step))
    return alternatives


def cases() -> list[Case]:
    """Return a row per step of an update and number of versions."""
    return [
        Case(f"{step}, versions: {members}", partial(build, step=step, members=members))
        for members in MEMBERS
        for step in ("publish", "pull")
    ]
