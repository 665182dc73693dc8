"""Decides whether a collector collects on a device, and refuses what it cannot."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from marl_collect.core.batch import EnvBatch
from marl_collect.core.batched import WorldBatch
from marl_collect.core.random_actions import is_random
from marl_collect.devices.random_actions import DeviceRandomRunner
from marl_collect.devices.worlds import same_device
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.choose import ActingOptions, make_runner
from marl_collect.policies.runner import PolicyRunner

UNSUPPORTED = {
    "compact_obs": "omit it: batches have all next observations",
    "check_actions": "omit it: actions outside their space are errors at the end of a "
    "batch",
    "cudagraph_policy": "omit it",
    "curriculum": "build the simulator without a device",
}
"""Options of ``Collector`` that need the host in each frame, and what to do."""


def with_device(engine: EnvBatch) -> WorldBatch | None:
    """Return the worlds of a simulator with a device; None for all others."""
    if isinstance(engine, WorldBatch) and engine.env.simulator_device is not None:
        return engine
    return None


def make_resident_runner(
    policy: Any, engine: WorldBatch, acting: ActingOptions, options: Any
) -> PolicyRunner:
    """Return a runner of ``policy`` on tensors of the simulator's device.

    Args:
        policy: a callable on TensorDicts, or None for random actions.
        engine: the worlds.
        acting: how the policy is run.
        options: of the collector.

    Raises:
        ValueError: for an option that is not supported on a device, or a policy on
            another device; names it.
    """
    device = engine.env.simulator_device
    assert device is not None
    who = f"{type(engine.env).__name__}(device={str(device)!r})"
    for name, advice in UNSUPPORTED.items():
        if getattr(options, name):
            raise ValueError(
                f"{name} is not supported by a Collector over {who}, which keeps its "
                f"frames on the device: {advice}."
            )
    if isinstance(policy, AssignedPolicies):
        raise ValueError(  # noqa: TRY004 - the options are wrong, not their types
            f"policies and assign are not supported by a Collector over {who}, which "
            "does not know on the host when episodes begin: build the simulator "
            "without a device."
        )
    if is_random(policy):
        return DeviceRandomRunner(engine.description)
    if not same_device(torch.device(acting.device), device) and (
        isinstance(policy, nn.Module) or options.policy_device is not None
    ):
        raise ValueError(
            f"The policy acts on {acting.device}, but a Collector over {who} keeps "
            f"observations on {device}: move the policy there, and pass no other "
            "policy_device."
        )
    return make_runner(
        policy, engine, replace(acting, device=str(device), resident=True)
    )
