"""Multi-agent data collection for PyTorch, at the speed of the environments.

Importing this package costs milliseconds: a public name loads its module when it is
first used. A new name goes into the imports for type checkers, `__all__` and the table;
`tests/test_import.py` compares the three. It must not be the name of a module in this
folder: importing that module would put the module in the name's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marl_collect.check import ContractError, check_env
    from marl_collect.collectors import (
        Collector,
        CollectorOptions,
        ExplorationType,
        MultiAsyncCollector,
        MultiaSyncDataCollector,
        MultiCollector,
        MultiSyncCollector,
        MultiSyncDataCollector,
        SyncDataCollector,
    )
    from marl_collect.description import EnvDescription, GroupDescription
    from marl_collect.distributed import RayCollector
    from marl_collect.env import MultiAgentEnv
    from marl_collect.errors import ClosedError, PolicyError, WorkerError
    from marl_collect.evaluation import Evaluation, Evaluator, evaluate
    from marl_collect.groups import MarlGroupMapType
    from marl_collect.inspection import describe
    from marl_collect.last_observations import restore_next
    from marl_collect.materializing import infer_lazy, materialize
    from marl_collect.parallel_env import ParallelEnv, SerialEnv
    from marl_collect.policies.random import RandomPolicy
    from marl_collect.rendering import play, to_frames, write_video
    from marl_collect.storage import open_dataset, record
    from marl_collect.trajectories import split_trajectories

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "Collector",
    "CollectorOptions",
    "ContractError",
    "EnvDescription",
    "Evaluation",
    "Evaluator",
    "ExplorationType",
    "GroupDescription",
    "MarlGroupMapType",
    "MultiAgentEnv",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "ParallelEnv",
    "PolicyError",
    "RandomPolicy",
    "RayCollector",
    "SerialEnv",
    "SyncDataCollector",
    "WorkerError",
    "check_env",
    "describe",
    "evaluate",
    "infer_lazy",
    "materialize",
    "open_dataset",
    "play",
    "record",
    "restore_next",
    "split_trajectories",
    "to_frames",
    "write_video",
]

# Public name -> the module that has it.
_MODULES = {
    "ClosedError": "marl_collect.errors",
    "Collector": "marl_collect.collectors",
    "CollectorOptions": "marl_collect.collectors",
    "ContractError": "marl_collect.check",
    "EnvDescription": "marl_collect.description",
    "Evaluation": "marl_collect.evaluation",
    "Evaluator": "marl_collect.evaluation",
    "ExplorationType": "marl_collect.collectors",
    "GroupDescription": "marl_collect.description",
    "MarlGroupMapType": "marl_collect.groups",
    "MultiAgentEnv": "marl_collect.env",
    "MultiAsyncCollector": "marl_collect.collectors",
    "MultiCollector": "marl_collect.collectors",
    "MultiSyncCollector": "marl_collect.collectors",
    "MultiSyncDataCollector": "marl_collect.collectors",
    "MultiaSyncDataCollector": "marl_collect.collectors",
    "ParallelEnv": "marl_collect.parallel_env",
    "PolicyError": "marl_collect.errors",
    "RandomPolicy": "marl_collect.policies.random",
    "RayCollector": "marl_collect.distributed",
    "SerialEnv": "marl_collect.parallel_env",
    "SyncDataCollector": "marl_collect.collectors",
    "WorkerError": "marl_collect.errors",
    "check_env": "marl_collect.check",
    "describe": "marl_collect.inspection",
    "evaluate": "marl_collect.evaluation",
    "infer_lazy": "marl_collect.materializing",
    "materialize": "marl_collect.materializing",
    "open_dataset": "marl_collect.storage",
    "play": "marl_collect.rendering",
    "record": "marl_collect.storage",
    "restore_next": "marl_collect.last_observations",
    "split_trajectories": "marl_collect.trajectories",
    "to_frames": "marl_collect.rendering",
    "write_video": "marl_collect.rendering",
}


def __getattr__(name: str) -> object:
    """Loads a public name's module; the name is an ordinary global from then on."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
