"""``make_critic``: builds the values of all groups' agents, for any observations."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from marl_collect.core.description import EnvDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models.critic import CrossCriticGroupSpec, CrossGroupCritic
from marl_collect.models.group_module import GroupModule
from marl_collect.models.group_network import (
    After,
    GroupNetwork,
    Numbers,
    encoder_of,
    feed_forward,
    identities,
    recurrent_networks,
)
from marl_collect.models.layers.inputs import Leaf, observation_leaves
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy import description_of
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.models.recurrent.module import RecurrentModule

STATE_PREFIX = "critic_"
"""Begins the names of a recurrent critic's states."""

_OPTIONS = {
    *("centralised", "share_params", "agent_ids", "num_cells", "activation_class"),
    *("recurrent", "hidden_size", "num_layers", "conv", "device"),
}


def make_critic(what: Any, **options: Any) -> TensorDictModuleBase:
    """Build a critic that writes ``(group, "state_value")`` ``[*B, n, 1]``.

    Vectors, images, categories, and Dict and Tuple spaces of these are read as
    ``make_policy`` reads them. A critic with ``centralised=True`` reads the
    observations of all groups, and returns one value per agent; otherwise each agent's
    value depends on its own observation only. If all observations are vectors and
    ``recurrent`` is None, a centralised critic is a ``CrossGroupCritic``. Its trunk is
    one network with an output for each agent, so ``share_params`` does not apply to it.

    A recurrent critic has states as a recurrent policy does, with names that begin
    with ``critic_``.

    Args:
        what: an environment, an environment factory (called once in its own process),
            or the result of ``describe(factory)``.
        **options: those of ``PolicyOptions`` that configure networks: ``centralised``,
            ``share_params``, ``agent_ids``, ``num_cells``, ``activation_class``,
            ``recurrent``, ``hidden_size``, ``num_layers``, ``conv`` and ``device``. A
            centralised critic knows the agents without ``agent_ids``.

    Raises:
        TypeError: for an unknown option, or an observation space without a network.
        ValueError: for options that contradict each other.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(
            f"make_critic() has no option {', '.join(unknown)}: expected "
            f"{', '.join(sorted(_OPTIONS))}."
        )
    chosen = PolicyOptions(**options)
    description = description_of(what)
    leaves = {
        name: observation_leaves(group.observation, (name, "observation"))
        for name, group in description.groups.items()
    }
    plain = all(len(arrays) == 1 and arrays[0].is_plain for arrays in leaves.values())
    device = torch.get_default_device() if chosen.device is None else chosen.device
    with float32_on(device):
        if chosen.centralised and plain and chosen.recurrent is None:
            return _cross_critic(description, leaves, chosen)
        modules = [
            _group_critic(name, description, leaves, chosen)
            for name in description.groups
        ]
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)


@final
class JointNetwork(nn.Module):
    """Gives each agent of a group the encoded observations of all groups.

    Args:
        leaves: the arrays of each group's observation, in the order of the inputs.
        n_agents: number of agents of each group.
        name: of the group whose agents get the result, followed by their identities.
        options: of the encoders, which all agents of a group share.
        after: builds the network after the encoders.
    """

    pure_forward = True

    def __init__(
        self,
        leaves: Mapping[str, list[Leaf]],
        n_agents: Mapping[str, int],
        name: str,
        options: PolicyOptions,
        after: After,
    ) -> None:
        super().__init__()
        code = _width(options)
        shared = replace(options, share_params=True, agent_ids=False)
        self.n_agents = n_agents[name]
        self.n_leaves = [len(arrays) for arrays in leaves.values()]
        self.encoders = nn.ModuleList(
            GroupNetwork(
                arrays, n_agents[group], shared, _coder(n_agents[group], options)
            )
            for group, arrays in leaves.items()
        )
        self.mlp = after(code * sum(n_agents.values()) + self.n_agents)

    def forward(self, *values: Tensor) -> Tensor:
        """Map arrays ``[*B, n_agents, *shape]`` of all groups to the output."""
        codes, begin = [], 0
        for encoder, count in zip(self.encoders, self.n_leaves, strict=True):
            codes.append(encoder(*values[begin : begin + count]).flatten(-2))
            begin += count
        joint = torch.cat(codes, -1).unsqueeze(-2)
        joint = joint.expand(*joint.shape[:-2], self.n_agents, joint.shape[-1])
        out: Tensor = self.mlp(torch.cat([joint, identities(self.n_agents, joint)], -1))
        return out


def _coder(n_agents: int, options: PolicyOptions) -> After:
    def after(n_inputs: int) -> nn.Module:
        return MultiAgentMLP(
            n_inputs,
            _width(options),
            n_agents,
            centralised=False,
            share_params=True,
            num_cells=(),
            activation_class=options.activation_class,
            activate_last_layer=True,
        )

    return after


def _width(options: PolicyOptions) -> int:
    """Return the features of an encoded observation."""
    return options.num_cells[0] if options.num_cells else options.hidden_size


def _cross_critic(
    description: EnvDescription,
    leaves: Mapping[str, list[Leaf]],
    options: PolicyOptions,
) -> CrossGroupCritic:
    specs = {
        name: CrossCriticGroupSpec(
            leaves[name][0].size,
            group.n_agents,
            leaves[name][0].key,
            (name, "state_value"),
        )
        for name, group in description.groups.items()
    }
    return CrossGroupCritic(
        specs,
        d_model=_width(options),
        trunk_depth=len(options.num_cells),
        trunk_cells=options.num_cells,
        activation_class=options.activation_class,
    )


def _group_critic(
    name: str,
    description: EnvDescription,
    leaves: Mapping[str, list[Leaf]],
    options: PolicyOptions,
) -> TensorDictModuleBase:
    n_agents = {group: member.n_agents for group, member in description.groups.items()}
    encoded: Callable[[After], nn.Module]
    if options.centralised:
        options = replace(options, centralised=False)

        def encoded(after: After) -> nn.Module:
            return JointNetwork(leaves, n_agents, name, options, after)

        in_keys = [leaf.key for arrays in leaves.values() for leaf in arrays]
    else:
        encoded = encoder_of(leaves[name], n_agents[name], options)
        in_keys = [leaf.key for leaf in leaves[name]]
    out_keys = [(name, "state_value")]
    parts = (encoded, Numbers(1), n_agents[name], options)
    if options.recurrent is None:
        return GroupModule(feed_forward(*parts), in_keys, out_keys, group=name)
    encoder, core, decoder = recurrent_networks(*parts)
    return RecurrentModule(
        core,
        name,
        in_keys,
        out_keys,
        encoder=encoder,
        decoder=decoder,
        state_prefix=STATE_PREFIX,
    )
