"""Starts a collector's workers from the user's arguments."""

from collections.abc import Sequence
from typing import Any

import torch

from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import check_policy
from marl_collect.collectors.worker_group import WorkerGroup
from marl_collect.core.factories import Factory, spread


def start_workers(
    create_env_fn: Factory | Sequence[Factory], policy: Any, options: CollectorOptions
) -> WorkerGroup:
    """Check the arguments and start the workers."""
    check_policy(policy, options.policy_factory)
    factories = spread(
        create_env_fn,
        options.num_workers,
        options.envs_per_worker,
        options.create_env_kwargs,
    )
    if not isinstance(options.frames_per_batch, int):
        options.frames_of([len(own) for own in factories])
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    return WorkerGroup(factories, policy, options)
