"""Multi-agent data collection for PyTorch, on one machine or a cluster.

Importing this package takes milliseconds: a public name loads its module on first use.
A public name must not be the name of a module in this folder, because importing that
module would replace it.
"""

import logging
from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.buffers.compact_observations import restore_next as restore_next
    from marl_collect.buffers.trajectories import (
        split_trajectories as split_trajectories,
    )
    from marl_collect.collectors import Collector as Collector
    from marl_collect.collectors import CollectorOptions as CollectorOptions
    from marl_collect.collectors import ExplorationType as ExplorationType
    from marl_collect.collectors import MultiAsyncCollector as MultiAsyncCollector
    from marl_collect.collectors import (
        MultiaSyncDataCollector as MultiaSyncDataCollector,
    )
    from marl_collect.collectors import MultiCollector as MultiCollector
    from marl_collect.collectors import MultiSyncCollector as MultiSyncCollector
    from marl_collect.collectors import MultiSyncDataCollector as MultiSyncDataCollector
    from marl_collect.collectors import SyncDataCollector as SyncDataCollector
    from marl_collect.core.batched import BatchedEnv as BatchedEnv
    from marl_collect.core.batched import Step as Step
    from marl_collect.core.description import EnvDescription as EnvDescription
    from marl_collect.core.description import GroupDescription as GroupDescription
    from marl_collect.core.env import MultiAgentEnv as MultiAgentEnv
    from marl_collect.core.env_wrapper import EnvWrapper as EnvWrapper
    from marl_collect.core.groups import MarlGroupMapType as MarlGroupMapType
    from marl_collect.core.random_actions import RandomPolicy as RandomPolicy
    from marl_collect.distributed import RayCollector as RayCollector
    from marl_collect.errors import ClosedError as ClosedError
    from marl_collect.errors import PolicyError as PolicyError
    from marl_collect.errors import WorkerError as WorkerError
    from marl_collect.evaluation.evaluator import Evaluation as Evaluation
    from marl_collect.evaluation.evaluator import Evaluator as Evaluator
    from marl_collect.evaluation.evaluator import evaluate as evaluate
    from marl_collect.parallel_env import ParallelEnv as ParallelEnv
    from marl_collect.parallel_env import SerialEnv as SerialEnv
    from marl_collect.parallel_env.describe import describe as describe
    from marl_collect.policies.assigned import AssignedPolicies as AssignedPolicies
    from marl_collect.policies.pool import PolicyPool as PolicyPool
    from marl_collect.rendering import play as play
    from marl_collect.rendering import to_frames as to_frames
    from marl_collect.rendering import write_video as write_video
    from marl_collect.storage import open_dataset as open_dataset
    from marl_collect.storage import record as record
    from marl_collect.testing.check_env import ContractError as ContractError
    from marl_collect.testing.check_env import check_env as check_env
    from marl_collect.weights.materialize import infer_lazy as infer_lazy
    from marl_collect.weights.materialize import materialize as materialize

__version__ = "0.1.0"

# Quiet unless the user configures logging; each module has a logger of its own name.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__getattr__, __dir__ = lazy.attach(__name__)
