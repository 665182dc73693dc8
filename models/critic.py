"""``CrossGroupCritic``: a critic on the observations of several groups."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from marl_collect.models.by_group import ModulesByGroup
from marl_collect.models.mlp import LayerFactory, hidden_sizes, mlp

NestedKey = str | tuple[str, ...]


@dataclass(frozen=True)
class CrossCriticGroupSpec:
    """One group of a ``CrossGroupCritic``.

    Attributes:
        obs_dim: features of one agent's observation; ``None`` infers them from the
            first input.
        n_agents: number of agents.
        obs_key: key of the observations, such as ``("walker", "observation")``.
        value_key: key of the values, such as ``("walker", "state_value")``.
    """

    obs_dim: int | None
    n_agents: int
    obs_key: NestedKey
    value_key: NestedKey


class CrossGroupNet(nn.Module):
    """The network of a ``CrossGroupCritic``, on tensors.

    A linear layer per group encodes the observations. The trunk maps the concatenated
    codes of all agents to a code per agent. A linear layer maps each code to a value.
    """

    def __init__(
        self,
        group_map: Mapping[str, CrossCriticGroupSpec],
        *,
        d_model: int,
        trunk_depth: int,
        trunk_cells: int | Sequence[int],
        activation_class: LayerFactory,
        share_params: bool,
        detach_groups: Iterable[str],
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.groups = dict(group_map)
        self.detach_groups = frozenset(detach_groups)
        unknown = sorted(self.detach_groups - self.groups.keys())
        if unknown or not self.groups:
            raise ValueError(
                "group_map must have at least one group, and detach_groups may name "
                f"only these groups, but the groups are {sorted(self.groups)} and "
                f"detach_groups also names {unknown}."
            )
        self.encoders = ModulesByGroup(
            {
                name: mlp(
                    spec.obs_dim,
                    d_model,
                    (),
                    activation=(activation_class, None),
                    activate_last_layer=True,
                    device=device,
                )
                for name, spec in self.groups.items()
            }
        )
        joint = d_model * sum(spec.n_agents for spec in self.groups.values())
        cells = hidden_sizes(trunk_depth, trunk_cells)
        activation = (activation_class, None)
        self.trunk = mlp(joint, joint, cells, activation=activation, device=device)
        self.shared_head: nn.Linear | None = None
        self.group_heads: ModulesByGroup | None = None
        if share_params:
            self.shared_head = nn.Linear(d_model, 1, device=device)
        else:
            self.group_heads = ModulesByGroup(
                {name: nn.Linear(d_model, 1, device=device) for name in self.groups}
            )

    def forward(self, *observations: Tensor) -> tuple[Tensor, ...]:
        """Map each ``[*B, n_agents, obs_dim]`` to values ``[*B, n_agents, 1]``."""
        codes = []
        for (name, spec), x in zip(self.groups.items(), observations, strict=True):
            expected = (spec.n_agents, spec.obs_dim or x.shape[-1])
            if x.shape[-2:] != expected:
                raise ValueError(
                    f"Group {name!r} ({spec.obs_key}): expected an observation "
                    f"[*B, n_agents={expected[0]}, obs_dim={expected[1]}], but found "
                    f"the shape {list(x.shape)}."
                )
            code = self.encoders[name](x)
            codes.append(code.detach() if name in self.detach_groups else code)
        together = torch.cat(codes, -2)
        joint = self.trunk(together.flatten(-2)).view_as(together)
        parts = joint.split([spec.n_agents for spec in self.groups.values()], -2)
        if self.shared_head is not None:
            return tuple(self.shared_head(part) for part in parts)
        heads = self.group_heads
        pairs = zip(self.groups, parts, strict=True)
        return tuple(heads[name](part) for name, part in pairs)  # type: ignore[index]


@final
class CrossGroupCritic(TensorDictModule):
    """Computes the values of all groups' agents from the observations of all groups.

    Args:
        group_map: group name to its spec, in the order of the inputs.
        d_model: features of an encoded observation.
        trunk_depth: number of hidden layers of the trunk.
        trunk_cells: units of each hidden layer of the trunk: one number for all
            layers, or one per layer.
        activation_class: builds the activations.
        share_params: whether all groups share the last linear layer. Each group always
            has its own encoder, and the trunk is always shared.
        detach_groups: groups whose encoders get no gradient.
        device: device of the weights.

    Raises:
        ValueError: if there is no group, ``detach_groups`` names an unknown group, or
            ``trunk_depth`` contradicts ``trunk_cells``.

    Source:
        Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent
        Games", arXiv 2103.01955, for critics that see more than one agent.
    """

    def __init__(
        self,
        group_map: Mapping[str, CrossCriticGroupSpec],
        *,
        d_model: int = 64,
        trunk_depth: int = 2,
        trunk_cells: int | Sequence[int] = 256,
        activation_class: LayerFactory = nn.Tanh,
        share_params: bool = False,
        detach_groups: Iterable[str] = (),
        device: torch.device | str | None = None,
    ) -> None:
        net = CrossGroupNet(
            group_map,
            d_model=d_model,
            trunk_depth=trunk_depth,
            trunk_cells=trunk_cells,
            activation_class=activation_class,
            share_params=share_params,
            detach_groups=detach_groups,
            device=device,
        )
        super().__init__(
            module=net,
            in_keys=[spec.obs_key for spec in group_map.values()],
            out_keys=[spec.value_key for spec in group_map.values()],
        )

    def load_torchrl_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the weights of TorchRL's critic, which have the same names."""
        self.load_state_dict(state_dict)
