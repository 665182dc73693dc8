"""Chooses the runner of a policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import CudaGraphModule, InteractionType
from torch import nn

from marl_collect.core.batch import EnvBatch
from marl_collect.core.random_actions import is_random
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.assigned_runner import AssignedRunner
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import PolicyRunner, RandomRunner


@dataclass(frozen=True)
class ActingOptions:
    """How a policy is run; plain data that can be pickled.

    Attributes:
        device: device of the policy; a module is moved there.
        compile_policy: arguments of ``torch.compile``; None for no compilation.
        cudagraph_policy: arguments of ``CudaGraphModule``; None for no CUDA graph.
        exploration: the interaction type to prepare for.
        check_actions: whether to check actions before environments execute them.
        resident: whether the memory consists of tensors of ``device``.
    """

    device: str = "cpu"
    compile_policy: Mapping[str, Any] | None = None
    cudagraph_policy: Mapping[str, Any] | None = None
    exploration: InteractionType = InteractionType.RANDOM
    check_actions: bool = False
    resident: bool = False


def make_runner(
    policy: Any, engine: EnvBatch, options: ActingOptions | None = None
) -> PolicyRunner:
    """Return a runner of ``policy`` for the environments of ``engine``.

    Args:
        policy: a callable on TensorDicts, AssignedPolicies, or None or RandomPolicy for
            random actions.
        engine: the environments.
        options: how the policy is run.
    """
    options = options or ActingOptions()
    if isinstance(policy, AssignedPolicies):
        runners = [
            _make_single(policy[name], engine, options, every_action=False)
            for name in policy.names
        ]
        return AssignedRunner(policy, runners, engine.description, engine.size)
    return _make_single(policy, engine, options)


def _make_single(
    policy: Any, engine: EnvBatch, options: ActingOptions, *, every_action: bool = True
) -> PolicyRunner:
    if is_random(policy):
        return RandomRunner(engine.description)
    device = torch.device(options.device)
    if isinstance(policy, nn.Module):
        kinds = {device.type, *(tensor.device.type for tensor in policy.parameters())}
        policy = policy if kinds == {"cpu"} else policy.to(device)
    if options.compile_policy is not None:
        policy = torch.compile(policy, **options.compile_policy)
    if options.cudagraph_policy is not None:
        policy = CudaGraphModule(policy, **options.cudagraph_policy)
    module = ModuleRunner(
        policy,
        engine.description,
        engine.size,
        device,
        options.exploration,
        every_action=every_action,
    )
    if options.resident:
        return module
    return FusedRunner(module)
