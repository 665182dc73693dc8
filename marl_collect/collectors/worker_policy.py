"""The policy of a worker, which acts with the weights that the trainer published."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from marl_collect.collectors import messages
from marl_collect.collectors.initialization import build_policy
from marl_collect.core.batch import EnvBatch
from marl_collect.core.seeding import weights_seed
from marl_collect.policies.choose import ActingOptions, make_runner
from marl_collect.policies.runner import PolicyRunner, RandomRunner
from marl_collect.rollout.episodes import Plan
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.sending import StateCopy, structure
from marl_collect.weights.shared import mapped
from marl_collect.weights.skeleton import assemble_module, weight_tensors


@final
class WorkerPolicy:
    """A policy whose weights are views of one vector of this worker.

    Attributes:
        module: the policy; None for random actions.
        layout: of its weights, None if it has none.
    """

    layout: WeightLayout | None = None
    # Of a module on a device, and the views of the vector that are copied there.
    _tensors: tuple[torch.Tensor, ...] = ()
    _views: tuple[torch.Tensor, ...] = ()
    _copy: StateCopy | None = None

    def __init__(self, policy: Any, parts: Sequence[EnvBatch], plan: Plan) -> None:
        """Build the policy.

        Args:
            policy: a ``SkeletonPolicy`` or ``FactoryPolicy``, a callable without
                weights, or None for random actions.
            parts: the environments.
            plan: which episodes to collect.
        """
        self.module: Any = policy
        if isinstance(policy, messages.SkeletonPolicy):
            self._assemble(policy)
        elif isinstance(policy, messages.FactoryPolicy):
            self._build(policy, parts, plan)

    def _assemble(self, policy: messages.SkeletonPolicy) -> None:
        views = self._open_vector(policy.layout)
        # Before the first call: zero weights would hide differences between paths.
        self._pull(policy.weights_slot, policy.handle)
        self.module = assemble_module(policy.skeleton, views)
        self._copy = StateCopy(self.module)

    def _build(
        self, policy: messages.FactoryPolicy, parts: Sequence[EnvBatch], plan: Plan
    ) -> None:
        self.module = module = build_policy(
            policy.factory,
            parts,
            plan,
            weights_seed(plan.seed, policy.index),
            trust=policy.trust,
        )
        if not isinstance(module, nn.Module):
            return
        weights = weight_tensors(module)
        views = self._open_vector(WeightLayout.of(module))
        for tensor, view in zip(weights.values(), views, strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        if policy.follows == structure(module):
            self._copy = StateCopy(module)

    def _open_vector(self, layout: WeightLayout) -> list[torch.Tensor]:
        """Reserve memory for weights of this layout; return views of it."""
        self.layout = layout
        self._vector = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        self._slots: dict[int, torch.Tensor] = {}
        return layout.views(self._vector)

    def runners(
        self, parts: Sequence[EnvBatch], acting: ActingOptions
    ) -> list[PolicyRunner]:
        """Return what acts in each part of the environments, on the policy's device."""
        if self.module is None:
            return [RandomRunner(part.description) for part in parts]
        module, device = self.module, torch.device(acting.device)
        if self.layout is not None and device.type != "cpu":
            module = module.to(device)
            weights = weight_tensors(module).values()
            self._tensors = tuple(tensor.detach() for tensor in weights)
            self._views = tuple(self.layout.views(self._vector))
        return [make_runner(module, part, acting) for part in parts]

    def publish(self, weights_slot: int, handle: Any) -> None:
        """Write the policy's own weights to this slot, for all workers to read."""
        self._slots[weights_slot] = mapped(handle)
        self._slots[weights_slot].copy_(self._vector)

    def _pull(self, weights_slot: int, handle: Any) -> None:
        """Copy the weights in a slot; ``handle`` is that of one not yet mapped."""
        if handle is not None:
            self._slots[weights_slot] = mapped(handle)
        # numpy's copy is faster, but in workers its large copies bypass the caches
        # (by glibc's memcpy), and the policy reads these weights next.
        self._vector.copy_(self._slots[weights_slot])

    def use(self, weights: messages.Weights) -> None:
        """Load these weights, and the state that comes with them."""
        if weights.state is not None:
            if self._copy is None:
                raise ValueError(
                    "An attribute of policy has changed, but policy_factory builds "
                    "other submodules than policy has, so it cannot be sent. Build the "
                    "same modules in both."
                )
            self._copy.apply(weights.state)
        if weights.weights_slot is None:
            return
        self._pull(weights.weights_slot, weights.handle)
        if self._views:
            torch._foreach_copy_(self._tensors, self._views)
