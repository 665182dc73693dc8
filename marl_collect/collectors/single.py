"""The collector in this process: the specification of the others."""

from collections.abc import Sequence
from typing import Any, Unpack, final

import torch
from tensordict.nn import set_interaction_type

from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.options import CollectorKeywords, CollectorOptions
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_policy,
    is_random,
    prepare,
)
from marl_collect.description import EnvDescription
from marl_collect.factories import Factory, build, spread
from marl_collect.layout import BatchContents, Layout, batch_fields
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import PolicyRunner, RandomRunner
from marl_collect.rollout import Plan, Rollout
from marl_collect.slots import Slots


@final
class Collector(CollectorBase):
    """Collects in this process, with the policy itself.

    Weights need no update: what acts is the module that is trained.

    Args:
        create_env_fn: a factory, or a list of factories: one per environment.
        policy: a module on TensorDicts, None for random actions.
        options: see :class:`~marl_collect.collectors.options.CollectorOptions`.
    """

    def __init__(
        self,
        create_env_fn: Factory | Sequence[Factory],
        policy: Any = None,
        **options: Unpack[CollectorKeywords],
    ) -> None:
        """Build the environments and the memory for two batches."""
        self._closed = True
        parsed = CollectorOptions.parse(options)
        check_policy(policy, parsed.policy_factory)
        workers = spread(
            create_env_fn,
            parsed.num_workers,
            parsed.envs_per_worker,
            parsed.create_env_kwargs,
        )
        if parsed.init_fn is not None:
            parsed.init_fn()
        seed = draw_seed(parsed.seed)
        self._engine = build([factory for worker in workers for factory in worker])
        try:
            self._slots = self._prepare(parsed, policy, seed)
        except BaseException:
            self._engine.close()
            raise
        self._open(parsed, self._trainer_policy)

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._engine.description

    def _prepare(self, options: CollectorOptions, policy: Any, seed: int) -> Slots:
        size = self._engine.size
        if policy is None and callable(options.policy_factory):
            policy = options.policy_factory()
        module = None if is_random(policy) else prepare(policy, self.description, seed)
        self._trainer_policy = TrainerPolicy(module)
        runner: PolicyRunner
        with torch.no_grad():
            if module is None:
                runner = RandomRunner(self.description)
            else:
                runner = ModuleRunner(module, self.description, size)
        plan = Plan(seed, range(size), options.max_frames_per_traj or 0)
        self._rollout = Rollout(self._engine, runner, plan)
        contents = contents_of(options, is_init=runner.reads_is_init)
        fields = batch_fields(
            self.description, runner.outputs, runner.carried, contents
        )
        frames = -(-options.frames_per_batch // size)
        return Slots(Layout.plan(fields, (size, frames)))

    def _batch_frames(self) -> int:
        batch, frames = self._slots.layout.batch
        return batch * frames

    def _collect(self, *, random: bool) -> Filled:
        slot = self._slots.take()
        arrays = self._slots.layout.arrays(self._slots.segment(slot).buffer)
        version = self._policy.version
        if self._options.reset_at_each_iter:
            self._rollout.reset()
        with torch.no_grad(), set_interaction_type(self._options.exploration_type):
            episodes = self._rollout.collect(arrays, version, random=random)
        return Filled(self._slots.hand_out(slot), episodes, (version, version))

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        self._policy.load(tensors)

    def _close(self, timeout: float) -> None:
        del timeout  # Nothing here waits for anybody.
        self._engine.close()
        self._slots.close()


def draw_seed(seed: int | None) -> int:
    """Return ``seed``, or one drawn from torch's generator if None."""
    return int(torch.randint(2**31 - 1, ())) if seed is None else seed


def contents_of(options: CollectorOptions, *, is_init: bool) -> BatchContents:
    """Return which keys a batch holds beside the environments' and the policy's."""
    return BatchContents(
        traj_ids=options.track_traj_ids,
        step_count=options.max_frames_per_traj is not None,
        policy_version=options.track_policy_version,
        is_init=is_init,
    )
