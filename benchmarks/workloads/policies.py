"""A policy for a collector, ours or TorchRL's."""

import importlib
from typing import Any

from torch import nn

from workloads import networks
from workloads.adapters import PICTURE
from workloads.table import WORKLOADS, Group


def policy(workload: str, name: str, library: str) -> Any:
    """Return the policy, None to act at random.

    Args:
        workload: whose groups it acts for.
        name: ``"random"``, ``"mlp"``, ``"unshared"`` or ``"cnn"``.
        library: ``"ours"`` or ``"torchrl"``: whose unshared networks.
    """
    if name == "random":
        return None
    from tensordict.nn import TensorDictModule, TensorDictSequential

    modules = []
    for group, group_description in WORKLOADS[workload].groups.items():
        observation = (group, "observation")
        key = (*observation, PICTURE) if name == "cnn" else observation
        net = _network(group_description, name, library)
        modules.append(TensorDictModule(net, [key], [(group, "action")]))
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)


def _network(group: Group, name: str, library: str) -> nn.Module:
    if name == "mlp":
        return networks.shared(group)
    if name == "cnn":
        return networks.pictures(group)
    if name != "unshared":
        raise ValueError(f"policy must be random, mlp, unshared or cnn, not {name!r}.")
    package = "marl_collect.models" if library == "ours" else "torchrl.modules"
    net = importlib.import_module(package).MultiAgentMLP(
        group.inputs,
        group.actions,
        group.agents,
        centralised=False,
        share_params=False,
        depth=2,
        num_cells=networks.CELLS,
    )
    return nn.Sequential(net, networks.last(group))
