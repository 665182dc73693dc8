"""Which runner acts for a policy."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict.nn import InteractionType
from torch import nn

from marl_collect.env import EnvBatch
from marl_collect.policies.fused import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.random import RandomPolicy
from marl_collect.policies.runner import PolicyRunner, RandomRunner


def make_runner(
    policy: Any,
    engine: EnvBatch,
    device: torch.device,
    compile_policy: Mapping[str, Any] | None = None,
    exploration: InteractionType = InteractionType.RANDOM,
) -> PolicyRunner:
    """Return a runner of ``policy`` for the environments of ``engine``.

    Args:
        policy: a callable on TensorDicts, or None or RandomPolicy for random actions.
        engine: whose observations it gets.
        device: where it acts; a module is moved there.
        compile_policy: arguments of ``torch.compile``, None for no compilation.
        exploration: how it will choose, most likely.
    """
    if policy is None or isinstance(policy, RandomPolicy):
        return RandomRunner(engine.description)
    if isinstance(policy, nn.Module) and device.type != "cpu":
        policy = policy.to(device)
    if compile_policy is not None:
        policy = torch.compile(policy, **compile_policy)
    with torch.no_grad():
        module = ModuleRunner(policy, engine.description, engine.size, device)
    return FusedRunner(module, engine.description, exploration)
