"""A policy for a collector, ours or TorchRL's, with the same weights for everybody."""

from typing import Any

from tensordict.nn import TensorDictModule, TensorDictSequential

from workloads import networks
from workloads.table import WORKLOADS


def policy(workload: str, name: str) -> Any:
    """Return the policy, None to act at random.

    Args:
        workload: whose groups it acts for.
        name: ``"random"`` or ``"mlp"``.
    """
    if name == "random":
        return None
    modules = [
        TensorDictModule(
            networks.shared(group), [(key, "observation")], [(key, "action")]
        )
        for key, group in WORKLOADS[workload].groups.items()
    ]
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)
