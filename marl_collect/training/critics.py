"""Critics that read each agent's own observation, or those of all agents."""

import math

from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import CrossCriticGroupSpec, CrossGroupCritic, MultiAgentMLP
from marl_collect.training.options import ACTIVATIONS, Setup, TrainingOptions


def make_critic(
    description: EnvDescription, setup: Setup, options: TrainingOptions
) -> nn.Module:
    """Build an algorithm's critic for all groups.

    It writes ``(group, "state_value")`` ``[*B, n, 1]``. MAPPO's critic reads the
    observations of all groups and returns one value per agent. IPPO's critic reads each
    agent's own observation, and shares weights if the policy does.

    Raises:
        TypeError: if observations are not vectors.
    """
    sizes = {
        name: _vector_size(name, group) for name, group in description.groups.items()
    }
    activation = ACTIVATIONS[options.activation]
    if setup.algorithm == "mappo":
        specs = {
            name: CrossCriticGroupSpec(
                sizes[name],
                group.n_agents,
                (name, "observation"),
                (name, "state_value"),
            )
            for name, group in description.groups.items()
        }
        return CrossGroupCritic(
            specs,
            d_model=options.num_cells[0],
            trunk_depth=len(options.num_cells),
            trunk_cells=options.num_cells[0],
            activation_class=activation,
        )
    modules = [
        TensorDictModule(
            MultiAgentMLP(
                sizes[name],
                1,
                group.n_agents,
                centralised=False,
                share_params=setup.share_params,
                num_cells=options.num_cells,
                activation_class=activation,
            ),
            in_keys=[(name, "observation")],
            out_keys=[(name, "state_value")],
        )
        for name, group in description.groups.items()
    ]
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)


def _vector_size(name: str, group: GroupDescription) -> int:
    space = group.observation
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise TypeError(
            f"Critics need vectors, but agents of group {name!r} observe {space}. "
            "Flatten the observation in the environment, or train with your own critic."
        )
    return math.prod(space.shape)
