"""``PolicyPool``: past versions of a policy, as opponents of its present version."""

import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from marl_collect.core.seeding import Purpose, checked_seed, generator_for
from marl_collect.options import Option, require
from marl_collect.weights.skeleton import weight_tensors

Keep = Literal["recent", "best", "random"]
Sample = Literal["uniform", "latest", "win_rate"]

_EMPTY = -1
"""The number of a version in a place that is not filled yet."""


class PolicyPool(nn.Module):
    """Keeps past versions of a policy and samples one per episode.

    It is a value of ``policies``; each place of the pool is a policy of its own::

        pool = PolicyPool(net, size=8, every=10, sample="win_rate")
        policies = {"main": net, "past": pool}

        def assign(seed, agents):
            learner = agents[seed % 2]
            return {a: "main" if a == learner else "past" for a in agents}

    Everything the pool knows is in its buffers. They are published and saved with the
    weights of the policies, so a resumed run has the same pool.

    Attributes:
        members: the versions, frozen, by place.
        versions: number of the version at each place, int64 ``[size]``; -1 if the place
            is empty. It is the number of updates, or a higher one if ``add`` was called
            more often. The newest version has the highest number.
        games: number of finished episodes of each version against the policy.
        wins: how many of them the policy won; a draw counts half.
        probabilities: with which the places are sampled, float64 ``[size]``.
        updates: calls of ``update`` so far.
    """

    versions: torch.Tensor
    games: torch.Tensor
    wins: torch.Tensor
    probabilities: torch.Tensor
    updates: torch.Tensor

    def __init__(
        self,
        policy: nn.Module,
        size: int = 8,
        *,
        every: int = 1,
        keep: Keep = "recent",
        sample: Sample = "uniform",
        seed: int = 0,
    ) -> None:
        """Begin with the present version of ``policy``.

        Args:
            policy: the module that is trained. It must have its weights.
            size: number of versions that are kept.
            every: number of updates between two versions.
            keep: which version makes room for a new one. ``"recent"``: the oldest;
                ``"best"``: the one against which the policy wins most;
                ``"random"``: the kept versions are a uniform sample of all.
            sample: ``"uniform"``; ``"latest"``; or ``"win_rate"``, which samples
                versions in proportion to the rate at which the policy does not win.
            seed: of the random choices of ``keep="random"``.

        Raises:
            TypeError: if the policy is no module, or a number is no integer.
            ValueError: if a number or a rule is not possible, or if the policy has
                lazy or meta tensors.
        """
        super().__init__()
        if not isinstance(policy, nn.Module):
            raise TypeError(
                f"PolicyPool keeps versions of a module, but got {policy!r}."
            )
        size = require("size", size, int, Option("", at_least=1))
        self._every = require("every", every, int, Option("", at_least=1))
        self._keep = require("keep", keep, Keep, Option(""))
        self._sample = require("sample", sample, Sample, Option(""))
        for name, tensor in weight_tensors(policy).items():
            if is_lazy(tensor) or tensor.is_meta:
                raise ValueError(
                    f"The policy has no values for {name} yet: initialise it before "
                    "its versions are kept, with marl_collect.materialize."
                )
        self._seed = checked_seed(seed)
        # In a list, because the policy is no part of the pool.
        self._policy = [policy]
        self.members = nn.ModuleList(copy.deepcopy(policy) for _ in range(size))
        self.members.requires_grad_(requires_grad=False)
        counts = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.register_buffer("versions", torch.full((size,), _EMPTY, device="cpu"))
        self.register_buffer("games", counts)
        self.register_buffer("wins", counts.clone())
        self.register_buffer("probabilities", counts.clone())
        self.register_buffer(
            "updates", torch.zeros((), dtype=torch.int64, device="cpu")
        )
        self.versions[0] = 0
        self._weigh()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the policy: a worker does not need a second one."""
        return vars(self) | {"_policy": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> "PolicyPool":
        """Keep the policy: the copy is updated from the policy's copy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self.members)

    @property
    def policy(self) -> Any:
        """The policy whose versions are kept; None in a worker."""
        return self._policy[0] if self._policy else None

    @property
    def uses_results(self) -> bool:
        """Whether a rule of the pool depends on ``games`` and ``wins``."""
        return self._keep == "best" or self._sample == "win_rate"

    def update(self) -> bool:
        """Count an update of the policy; keep every ``every``-th version.

        Returns:
            Whether the version was kept.
        """
        self.updates += 1
        if int(self.updates) % self._every:
            return False
        place = self._place()
        if place is None:
            return False
        self.add(place)
        return True

    def add(self, place: int) -> None:
        """Keep the present version of the policy at ``place``, whatever the rules."""
        present = weight_tensors(self.policy).values()
        with torch.no_grad():
            for copied, tensor in zip(
                weight_tensors(self.members[place]).values(), present, strict=True
            ):
                copied.copy_(tensor)
        # Without updates in between, versions differ by their numbers all the same.
        self.versions[place] = max(int(self.updates), int(self.versions.max()) + 1)
        self.games[place] = self.wins[place] = 0
        self._weigh()

    def played(self, place: int, score: float) -> None:
        """Record an episode against the version at ``place``.

        Args:
            place: of the version.
            score: 1 if the policy won, 0 if it lost, 0.5 for a draw.
        """
        self.games[place] += 1
        self.wins[place] += score
        self._weigh()

    @property
    def win_rates(self) -> torch.Tensor:
        """Estimated rate at which the policy beats each version, float64 ``[size]``.

        One win and one loss are added, so an unknown version has 0.5.
        """
        return (self.wins + 1) / (self.games + 2)

    def pick(self, seed: int) -> int:
        """Return the place that is sampled in the episode of ``seed``."""
        edges = np.cumsum(self.probabilities.numpy())
        number = generator_for(seed, Purpose.POOL_VERSION).random() * edges[-1]
        return int(np.searchsorted(edges, number, side="right"))

    def _place(self) -> int | None:
        """Return the place for the present version; None to drop this version."""
        empty = torch.nonzero(self.versions == _EMPTY)
        if len(empty):
            return int(empty[0])
        if self._keep == "recent":
            return int(self.versions.argmin())
        if self._keep == "best":
            return int(self.win_rates.argmax())
        # Reservoir sampling: the k-th version replaces one with probability size / k.
        number = int(self.updates) // self._every
        random = generator_for(self._seed, Purpose.POOL_PLACE, number)
        place = int(random.integers(number + 1))
        return place if place < self.size else None

    def _weigh(self) -> None:
        filled = self.versions != _EMPTY
        if self._sample == "latest":
            weights = (self.versions == self.versions.max()).double()
        elif self._sample == "uniform":
            weights = filled.double()
        else:
            weights = torch.where(filled, 1 - self.win_rates, 0.0)
        self.probabilities.copy_(weights / weights.sum())
