"""``make_policy``: builds a network and a head for each group of an environment."""

from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models.by_group import ModulesByGroup
from marl_collect.models.distributions.heads import (
    ActionHead,
    CategoricalHead,
    HeadOptions,
    MultiCategoricalHead,
    NormalHead,
    TanhNormalHead,
)
from marl_collect.models.group_module import GroupModule
from marl_collect.models.group_network import (
    encoder_of,
    feed_forward,
    read_leaves,
    recurrent_networks,
)
from marl_collect.models.last_action import LastAction, LastActionPolicy
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.models.recurrent.module import RecurrentModule

_EDGE = 1e-6

if TYPE_CHECKING:

    class Policy(ProbabilisticTensorDictSequential):
        """What type checkers know of a policy of ``make_policy``."""

        def __getitem__(self, index: Any) -> Any:
            """Return the policy of a group."""


def make_policy(what: Any, **options: Any) -> "Policy":
    """Build a policy that fits an environment's observations and actions.

    Each group gets a network and a head. The network is a ``MultiAgentMLP``, a
    ``MultiAgentAttention`` over the group's agents with ``network="attention"``, or the
    module that ``network`` builds. Images go through convolutions first, and
    ``recurrent`` adds a recurrent network. The action space determines the head:
    categorical for Discrete (masked if the environment has action masks; one-hot if its
    actions are), one categorical per entry for MultiDiscrete and MultiBinary,
    TanhNormal for a Box whose spans are finite in float32, and Normal for other Boxes.
    With ``epsilon``, the networks write the values of Discrete actions, and the policy
    is epsilon-greedy.

    Args:
        what: an environment, an environment factory (called once in its own process),
            or the result of ``describe(factory)``.
        **options: see ``PolicyOptions``.

    Returns:
        For one group, a ``ProbabilisticTensorDictSequential``, which losses accept as
        their actor. For several groups, a ``TensorDictSequential`` of these:
        ``policy[group]`` is the actor of one group.

    Raises:
        TypeError: for an unknown option, or a space without a network or head.
        ValueError: for options that contradict each other.
    """
    chosen = PolicyOptions.parse("make_policy()", options)
    description = description_of(what)
    policies = {
        name: group_policy(name, group, chosen)
        for name, group in description.groups.items()
    }
    if len(policies) == 1:
        return cast("Policy", next(iter(policies.values())))
    policy = TensorDictSequential(*policies.values())
    policy.module = ModulesByGroup(policies)
    return cast("Policy", policy)


def group_policy(
    name: str, group: GroupDescription, options: PolicyOptions
) -> ProbabilisticTensorDictSequential:
    """Build the policy of one group; see ``make_policy``."""
    head_options = HeadOptions(
        group=name,
        agents=group.agents,
        return_log_prob=options.return_log_prob,
        default_interaction_type=options.default_interaction_type,
    )
    leaves = read_leaves(name, group, options)
    in_keys = [leaf.key for leaf in leaves]
    device = torch.get_default_device() if options.device is None else options.device
    with float32_on(device):
        if options.head is not None:
            head = options.head(group, head_options)
        else:
            head = make_head(group, head_options, check_mask=options.check_mask)
        out_keys = [key for key in head.in_keys if key[-1] != "action_mask"]
        explore = None
        if options.epsilon is not None:
            explore = _explore(name, group, options.epsilon)
            out_keys = explore.in_keys[:1]
        encoded = encoder_of(leaves, group.n_agents, options)
        parts = (encoded, head, group.n_agents, options)
        if options.recurrent is None:
            module: TensorDictModuleBase = GroupModule(
                feed_forward(*parts),
                in_keys,
                out_keys,
                group=name,
                check_finite=options.check_finite,
            )
        else:
            encoder, core, decoder = recurrent_networks(*parts)
            module = RecurrentModule(
                core,
                name,
                in_keys,
                out_keys,
                encoder=encoder,
                decoder=decoder,
                check_finite=options.check_finite,
            )
    modules = [module, head] if explore is None else [module, explore, head]
    if not options.last_action:
        return ProbabilisticTensorDictSequential(*modules)
    last_action = LastAction.of(name, group)
    return LastActionPolicy(*modules, last_action=last_action, n_agents=group.n_agents)


def _explore(name: str, group: GroupDescription, epsilon: float) -> TensorDictModule:
    """Return the module between values of actions and the head."""
    if not isinstance(group.action, spaces.Discrete):
        raise TypeError(
            f"epsilon needs Discrete actions, but {name} acts in {group.action}."
        )
    masked = [(name, "action_mask")] if group.action_mask else []
    return TensorDictModule(
        EpsilonGreedyLogits(epsilon),
        in_keys=[(name, "action_value"), *masked],
        out_keys=[(name, "logits")],
    )


@final
class EpsilonGreedyLogits(nn.Module):
    """Logits of the policy that takes a random legal action with probability epsilon.

    The mode is the best action, so deterministic actions are greedy. Epsilon is a
    buffer, so it reaches workers together with the weights.

    Args:
        epsilon: initial value, in [0, 1].
    """

    pure_forward = True

    epsilon: Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map values ``[*B, n_agents, n_actions]`` to logits of the same shape.

        Args:
            values: values of the actions.
            mask: legal actions; None if all are legal.
        """
        legal = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        best = values.masked_fill(legal == 0, float("-inf")).argmax(-1, keepdim=True)
        chance = self.epsilon * legal / legal.sum(-1, keepdim=True)
        greedy = torch.zeros_like(values).scatter(-1, best, 1.0)
        # _EDGE keeps the best action the mode if all actions are equally likely. The
        # clamp gives actions with probability 0 a finite logit.
        return (chance + (1 - self.epsilon + _EDGE) * greedy).clamp_min(1e-12).log()


def make_head(
    group: GroupDescription,
    options: HeadOptions | None = None,
    *,
    check_mask: bool = True,
) -> ActionHead:
    """Build the head for a group's action space; see ``make_policy``.

    Raises:
        TypeError: if no head supports the space.
    """
    options = options or HeadOptions()
    space = group.action
    if isinstance(space, spaces.Discrete):
        return CategoricalHead(
            int(space.n),
            options,
            mask=group.action_mask,
            check_mask=check_mask,
            one_hot=group.one_hot,
        )
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiCategoricalHead(space.nvec.tolist(), options)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return MultiCategoricalHead([2] * space.shape[0], options)
    if isinstance(space, spaces.Box) and space.dtype.kind != "f":
        raise TypeError(
            f"There is no head for the action space {space} of group "
            f"{options.group!r}, whose numbers are {space.dtype}: expected floats. "
            "Declare whole numbers from 0 to n - 1 as MultiDiscrete([n, ...]), or pass "
            "make_policy(head=...) a function that builds a head for it."
        )
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        # Some environments write "no bounds" as the largest float32. A span that is
        # no float32 cannot scale tanh, so it is treated as what it means.
        with np.errstate(over="ignore", invalid="ignore"):
            span = np.subtract(space.high, space.low, dtype=np.float32)
        if np.isfinite(span).all():
            return TanhNormalHead(space.low.tolist(), space.high.tolist(), options)
        return NormalHead(space.shape[0], options)
    raise TypeError(
        f"There is no head for the action space {space} of group {options.group!r}: "
        "expected Discrete, or a one-dimensional MultiDiscrete, MultiBinary or Box. "
        "Pass make_policy(head=...) a function that builds a head for it."
    )


def description_of(what: Any) -> EnvDescription:
    """Return the description of an environment or factory, or ``what`` itself.

    Raises:
        TypeError: if ``what`` is not an environment, a factory or a description.
    """
    if isinstance(what, EnvDescription):
        return what
    description = getattr(what, "description", None)
    if isinstance(description, EnvDescription):
        return description
    if callable(what):
        from marl_collect.parallel_env.describe import describe

        return describe(what)
    raise TypeError(
        "Expected an environment, an environment factory, or the result of "
        f"describe(factory), but found {what!r} of type {type(what).__name__}."
    )
