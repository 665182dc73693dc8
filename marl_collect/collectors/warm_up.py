"""Runs a policy once in the fork server, so workers inherit all lazy imports.

Libraries import parts of themselves on first use: the first call of a policy makes
tensordict load pandas and h5py, if they are installed. In each worker this would take
longer than the rest of its start, and tens of megabytes that are not shared. The fork
server therefore imports this module.
"""

import torch
from gymnasium import spaces
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import Generators

_GROUP = "agents"


def warm_up() -> None:
    """Act once with the smallest policy, both called and fused."""
    box = spaces.Box(-1.0, 1.0, (1,))
    group = GroupDescription(("agent",), box, box)
    description = EnvDescription("warm_up", {_GROUP: group})
    network = TensorDictModule(
        nn.Linear(1, 1), [(_GROUP, "observation")], [(_GROUP, "action")]
    )
    how = InteractionType.RANDOM
    with torch.no_grad(), set_interaction_type(how):
        runner = FusedRunner(ModuleRunner(network, description, 1, how=how))
        memory = allocate(description.row(), (1,))
        runner.probe(memory)
        runner.bind(memory | allocate(runner.signature.memory(description), (1,)))
        runner.begin(1, Generators(0, range(1)))
        runner.act(0)


warm_up()
