"""A workload as our environment, and as TorchRL's: factories for collectors."""

from collections.abc import Callable, Mapping
from typing import Any

from workloads.table import WORKLOADS

PICTURE = "RGB"


def our_factory(name: str, keywords: Mapping[str, Any] = {}) -> Callable[[], Any]:
    """Return a factory of our environment."""
    workload = WORKLOADS[name]
    if keywords and workload.task:
        raise ValueError(f"{name} takes no keywords, but found {dict(keywords)}.")

    def make() -> Any:
        if workload.family == "meltingpot":
            from marl_collect.envs import MeltingpotEnv

            return MeltingpotEnv(workload.task, observations=[PICTURE])
        if workload.task:
            from marl_collect.envs import PettingZooEnv

            return PettingZooEnv(workload.task)
        from marl_collect.envs import PettingZooWrapper

        return PettingZooWrapper(workload.stock(**keywords))

    return make


def torchrl_factory(name: str) -> Callable[[], Any]:
    """Return a factory of TorchRL's environment, with the same keys stored."""
    workload = WORKLOADS[name]

    def make() -> Any:
        if workload.family == "meltingpot":
            return _torchrl_meltingpot(workload.task)
        from torchrl.envs import PettingZooWrapper

        return PettingZooWrapper(workload.stock())

    return make


def _torchrl_meltingpot(task: str) -> Any:
    """Return TorchRL's environment, spared the observations that we leave out too."""
    from meltingpot import substrate
    from torchrl.envs import MeltingpotWrapper

    config = substrate.get_config(task)
    with config.unlocked():
        config.individual_observation_names = [PICTURE]
    roles = config.default_player_roles
    return MeltingpotWrapper(env=substrate.build_from_config(config, roles=roles))
