"""``LastActionPolicy``: a policy whose networks read each agent's last action."""

from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor
from typing_extensions import override

from marl_collect.core.description import GroupDescription
from marl_collect.models.layers.inputs import Leaf

LAST_ACTION: Final = "last_action"
"""Name in a group of the numbers ``[*B, n, size]`` that stand for last actions."""


@final
@dataclass(frozen=True)
class LastAction:
    """The numbers that stand for an agent's action: categories are one-hot.

    Attributes:
        group: name of the group.
        size: how many there are.
        categories: how many categories a Discrete action has, or those of each entry
            of a MultiDiscrete one. None: actions are numbers, or one-hot already.
        mask: key of the agents that act in a frame; None if all do.
    """

    group: str
    size: int
    categories: int | tuple[int, ...] | None = None
    mask: tuple[str, str] | None = None

    @classmethod
    def of(cls, name: str, group: GroupDescription) -> Self:
        """Return what stands for the actions of a group.

        Raises:
            TypeError: if its action space has another kind or several dimensions.
        """
        space = group.action
        mask = (name, "mask") if group.mask else None
        if isinstance(space, spaces.Discrete):
            n = int(space.n)
            return cls(name, n, None if group.one_hot else n, mask)
        if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            choices = tuple(int(n) for n in space.nvec)
            return cls(name, sum(choices), choices, mask)
        flat = isinstance(space, spaces.Box | spaces.MultiBinary)
        if flat and space.shape is not None and len(space.shape) == 1:
            return cls(name, space.shape[0], None, mask)
        raise TypeError(
            f"last_action=True cannot write the actions {space} of group {name!r} as "
            "numbers: expected Discrete, or a one-dimensional MultiDiscrete, "
            "MultiBinary or Box."
        )

    @property
    def key(self) -> tuple[str, str]:
        """Key of the numbers."""
        return self.group, LAST_ACTION

    @property
    def leaf(self) -> Leaf:
        """The input of a network."""
        return Leaf(self.key, (self.size,), "vector", self.size)

    def encode(self, action: Tensor) -> Tensor:
        """Map actions ``[*B, n]`` or ``[*B, n, k]`` to float32 ``[*B, n, size]``."""
        if self.categories is None:
            return action.float()
        if isinstance(self.categories, int):
            return _one_hot(action, self.categories)
        entries = zip(action.unbind(-1), self.categories, strict=True)
        return torch.cat([_one_hot(entry, n) for entry, n in entries], -1)


def _one_hot(index: Tensor, size: int) -> Tensor:
    # F.one_hot() checks the values, for which it waits for the device.
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).float()


@final
class LastActionPolicy(ProbabilisticTensorDictSequential):
    """The policy of a group that hands each agent's action to the next frame.

    Its networks read ``(group, "last_action")``. After each action it writes
    ``("next", group, "last_action")``, which collectors, evaluations and rollouts carry
    into the next frame, and set to 0 when an episode begins. A missing one is replaced
    by zeros, which are also written. An agent that does not act keeps its last action.

    Args:
        *modules: as for ``ProbabilisticTensorDictSequential``.
        last_action: how actions are written. None writes nothing, as do parts of the
            policy, such as ``policy[:2]``.
        n_agents: number of agents in the group.
        **options: as for ``ProbabilisticTensorDictSequential``.
    """

    pure_forward = True
    by_row = True

    def __init__(
        self,
        *modules: Any,
        last_action: LastAction | None = None,
        n_agents: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*modules, **options)
        self.last_action = last_action
        self.n_agents = n_agents
        if last_action is not None:
            keys: Any = self  # tensordict does not say the types of its keys.
            if last_action.mask is not None:
                keys.in_keys = [*keys.in_keys, last_action.mask]
            keys.out_keys = [*keys.out_keys, ("next", *last_action.key)]

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator]
    @override
    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        **options: Any,
    ) -> TensorDictBase:
        """Act, and write the action for the next frame.

        Raises:
            KeyError: if keys are missing; names them.
        """
        last = self.last_action
        if last is None:
            return super().forward(tensordict, tensordict_out, **options)
        before = tensordict.get(last.key, None)
        if before is None:
            # Every frame of the data contains it, so the first must too.
            size = (*tensordict.batch_size, self.n_agents, last.size)
            read = tensordict.get(self.in_keys[0], None)
            device = None if read is None else read.device
            before = torch.zeros(size, dtype=torch.float32, device=device)
            tensordict.set(last.key, before)
        out = super().forward(tensordict, tensordict_out, **options)
        action = last.encode(out.get((last.group, "action")))
        acts = None if last.mask is None else tensordict.get(last.mask, None)
        if acts is not None:
            action = torch.where(acts.unsqueeze(-1), action, before)
        out.set(("next", *last.key), action)
        return out
