"""``make_critic``: builds the values of all groups' agents, for any observations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from marl_collect.core.description import EnvDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models.attention import ATTENTION, MultiAgentAttention, flag_leaf
from marl_collect.models.critic import CrossCriticGroupSpec, CrossGroupCritic
from marl_collect.models.group_module import GroupModule
from marl_collect.models.group_network import (
    After,
    GroupNetwork,
    Numbers,
    agent_leaves,
    encoder_of,
    feed_forward,
    identities,
    recurrent_networks,
)
from marl_collect.models.last_action import LastAction
from marl_collect.models.layers.inputs import Leaf
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy import description_of
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.models.recurrent.module import RecurrentModule

STATE_PREFIX = "critic_"
"""Begins the names of a recurrent critic's states."""

_OPTIONS = {
    *("centralised", "share_params", "agent_ids", "num_cells", "activation_class"),
    *("recurrent", "hidden_size", "num_layers", "conv", "device", "network"),
    "last_action",
}


def make_critic(what: Any, **options: Any) -> TensorDictModuleBase:
    """Build a critic that writes ``(group, "state_value")`` ``[*B, n, 1]``.

    Vectors, images, categories, and Dict and Tuple spaces of these are read as
    ``make_policy`` reads them. A critic with ``centralised=True`` reads the
    observations of all groups, and returns one value per agent; otherwise each agent's
    value depends on its own observation only. With ``last_action=True`` it reads the
    last actions of these agents, too, which a policy with this option writes. If all
    inputs are vectors of one key, and ``recurrent`` is None, a centralised critic is a
    ``CrossGroupCritic``. Its trunk is one network with an output for each agent, so
    ``share_params`` does not apply to it.

    With ``network="attention"``, each agent of a centralised critic attends to the
    agents of all groups, except to those that have terminated.

    A recurrent critic has states as a recurrent policy does, with names that begin
    with ``critic_``.

    Args:
        what: an environment, an environment factory (called once in its own process),
            or the result of ``describe(factory)``.
        **options: ``actions``, whether the critic also reads ``(group, "action")``, of
            Box spaces, of each agent whose observation it reads (by default False): it
            then writes ``(group, "state_action_value")``, and has no
            ``CrossGroupCritic``. Further those of ``PolicyOptions`` that configure
            networks: ``centralised``, ``share_params``, ``agent_ids``, ``num_cells``,
            ``activation_class``, ``recurrent``, ``hidden_size``, ``num_layers``,
            ``conv``, ``device``, ``last_action`` and ``network="attention"``. Other
            centralised critics know the agents without ``agent_ids``.

    Raises:
        TypeError: for an unknown option, an observation space without a network, or
            actions that are not Box.
        ValueError: for options that contradict each other.
    """
    actions = options.pop("actions", False)
    chosen = PolicyOptions.parse("make_critic()", options, _OPTIONS | {"actions"})
    if chosen.network not in (None, ATTENTION):
        raise ValueError(
            f"The network of make_critic() must be None or {ATTENTION!r}, but is "
            f"{chosen.network!r}."
        )
    description = description_of(what)
    leaves = {
        name: agent_leaves(name, group, chosen)
        for name, group in description.groups.items()
    }
    for name, group in description.groups.items() if actions else ():
        if not isinstance(group.action, spaces.Box):
            raise TypeError(
                f"actions=True needs Box actions, but {name} acts in {group.action}."
            )
        leaf = LastAction.of(name, group).leaf
        leaves[name].append(replace(leaf, key=(name, "action")))
    out = "state_action_value" if actions else "state_value"
    plain = all(len(arrays) == 1 and arrays[0].is_plain for arrays in leaves.values())
    device = torch.get_default_device() if chosen.device is None else chosen.device
    with float32_on(device):
        memory_or_set = chosen.recurrent is not None or chosen.network is not None
        if chosen.centralised and plain and not memory_or_set:
            return _cross_critic(description, leaves, chosen)
        modules = [
            _group_critic(name, description, leaves, chosen, (name, out))
            for name in description.groups
        ]
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)


@final
class JointNetwork(nn.Module):
    """Gives each agent of a group the encoded observations of all groups.

    Args:
        leaves: the arrays of each group's agents, in the order of the inputs.
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
        self.n_agents = n_agents[name]
        self.n_leaves = [len(arrays) for arrays in leaves.values()]
        options = replace(options, agent_ids=False)
        self.encoders = _encoders(leaves, n_agents, options)
        self.mlp = after(_width(options) * sum(n_agents.values()) + self.n_agents)

    def forward(self, *values: Tensor) -> Tensor:
        """Map arrays ``[*B, n_agents, *shape]`` of all groups to the output."""
        codes = _encoded(self.encoders, self.n_leaves, values)
        joint = torch.cat([code.flatten(-2) for code in codes], -1).unsqueeze(-2)
        joint = joint.expand(*joint.shape[:-2], self.n_agents, joint.shape[-1])
        out: Tensor = self.mlp(torch.cat([joint, identities(self.n_agents, joint)], -1))
        return out


@final
class JointAttention(nn.Module):
    """Gives each agent of a group a value that attends to the agents of all groups.

    Args:
        leaves: the arrays of each group's observation, in the order of the inputs.
        n_agents: number of agents of each group.
        name: of the group whose agents get values.
        options: of the encoders, which the agents of a group share, and of the
            attention.
    """

    pure_forward = True

    def __init__(
        self,
        leaves: Mapping[str, list[Leaf]],
        n_agents: Mapping[str, int],
        name: str,
        options: PolicyOptions,
    ) -> None:
        super().__init__()
        self.n_leaves = [len(arrays) for arrays in leaves.values()]
        names = list(n_agents)
        self.begin = sum(n_agents[other] for other in names[: names.index(name)])
        self.n_agents = n_agents[name]
        self.encoders = _encoders(leaves, n_agents, options)
        self.attention = MultiAgentAttention(
            _width(options) + 1,
            1,
            sum(n_agents.values()),
            centralised=True,
            share_params=options.share_params,
            num_cells=options.num_cells,
            activation_class=options.activation_class,
            absent=-1,
        )

    def forward(self, *values: Tensor) -> Tensor:
        """Return the values ``[*B, n_agents, 1]`` of the group's agents.

        Args:
            *values: arrays ``[*B, n_agents, *shape]`` of all groups, then for each
                group which agents have terminated, ``[*B, n_agents, 1]``.
        """
        n_groups = len(self.n_leaves)
        codes = torch.cat(_encoded(self.encoders, self.n_leaves, values), -2)
        absent = torch.cat(values[-n_groups:], -2).to(codes.dtype)
        out: Tensor = self.attention(torch.cat([codes, absent], -1))
        return out.narrow(-2, self.begin, self.n_agents)


def _encoders(
    leaves: Mapping[str, list[Leaf]],
    n_agents: Mapping[str, int],
    options: PolicyOptions,
) -> nn.ModuleList:
    """Build the encoder of each group, which all its agents share."""
    shared = replace(options, share_params=True)
    return nn.ModuleList(
        GroupNetwork(arrays, n_agents[name], shared, _coder(n_agents[name], options))
        for name, arrays in leaves.items()
    )


def _encoded(
    encoders: nn.ModuleList, n_leaves: Sequence[int], values: Sequence[Tensor]
) -> list[Tensor]:
    """Return the codes ``[*B, n_agents, code]`` of each group's agents."""
    codes, begin = [], 0
    for encoder, count in zip(encoders, n_leaves, strict=True):
        codes.append(encoder(*values[begin : begin + count]))
        begin += count
    return codes


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
    out_key: tuple[str, str],
) -> TensorDictModuleBase:
    n_agents = {group: member.n_agents for group, member in description.groups.items()}
    if options.network == ATTENTION:
        flags = [flag_leaf(group).key for group in n_agents]
        return GroupModule(
            JointAttention(leaves, n_agents, name, options),
            [*(leaf.key for arrays in leaves.values() for leaf in arrays), *flags],
            [out_key],
            group=name,
        )
    encoded: Callable[[After], nn.Module]
    if options.centralised:
        options = replace(options, centralised=False)

        def encoded(after: After) -> nn.Module:
            return JointNetwork(leaves, n_agents, name, options, after)

        in_keys = [leaf.key for arrays in leaves.values() for leaf in arrays]
    else:
        encoded = encoder_of(leaves[name], n_agents[name], options)
        in_keys = [leaf.key for leaf in leaves[name]]
    out_keys = [out_key]
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
