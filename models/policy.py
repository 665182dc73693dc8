"""Policies for whole environments: a network and a head for each group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)
from torch import Tensor, nn

from marl_collect.description import EnvDescription, GroupDescription
from marl_collect.models.convnet import MultiAgentConvNet
from marl_collect.models.heads import (
    ActionHead,
    CategoricalHead,
    HeadOptions,
    MultiCategoricalHead,
    NormalHead,
    TanhNormalHead,
    show_keys,
)
from marl_collect.models.inputs import (
    ImageInput,
    Leaf,
    LocScale,
    VectorInput,
    observation_leaves,
)
from marl_collect.models.mlp import LayerFactory, MultiAgentMLP

Key = tuple[str, ...]


@dataclass(frozen=True)
class PolicyOptions:
    """How :func:`make_policy` builds the policies of all groups.

    Attributes:
        centralised: whether each agent sees the observations of its whole group.
        share_params: whether one network serves all agents of a group.
        num_cells: units of the hidden layers.
        activation_class: makes their activations.
        conv: arguments of ``MultiAgentConvNet``, for groups that see images.
        device: where to create the weights; ``"meta"`` costs no memory, and collectors
            materialize such a policy.
        return_log_prob: whether ``(group, "action_log_prob")`` is written.
        check_mask: whether an action mask without a legal action is an error.
        check_finite: whether an output of a network that is not finite is an error. The
            check waits for the device in every call.
        default_interaction_type: how to choose where no ``set_interaction_type`` says.
    """

    centralised: bool = False
    share_params: bool = True
    num_cells: tuple[int, ...] = (64, 64)
    activation_class: LayerFactory = nn.Tanh
    conv: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str | None = None
    return_log_prob: bool = True
    check_mask: bool = True
    check_finite: bool = False
    default_interaction_type: InteractionType = InteractionType.DETERMINISTIC


def make_policy(what: Any, **options: Any) -> TensorDictSequential:
    """Build a policy that fits an environment's observations and actions.

    Each group gets a network (:class:`~marl_collect.models.MultiAgentMLP`, after
    convolutions where it sees images) and the head of its action space: categorical,
    masked where the environment gives masks, or one-hot, for Discrete; one choice per
    entry for MultiDiscrete and MultiBinary; TanhNormal for a Box with finite bounds,
    Normal for one without.

    Args:
        what: an environment, a zero-argument factory of one (it is then built once in a
            process of its own), or what ``describe(factory)`` returned.
        **options: see :class:`PolicyOptions`.

    Returns:
        For one group, a ``ProbabilisticTensorDictSequential``, which losses take as
        their actor. For several, a ``TensorDictSequential`` of these: ``policy[group]``
        is the actor of one group.

    Raises:
        TypeError: for an unknown option, or for a space that has no network or head.
    """
    chosen = PolicyOptions(**options)
    description = description_of(what)
    policies = {
        name: group_policy(name, group, chosen)
        for name, group in description.groups.items()
    }
    if len(policies) == 1:
        return next(iter(policies.values()))
    return TensorDictSequential(policies)


def group_policy(
    name: str, group: GroupDescription, options: PolicyOptions
) -> ProbabilisticTensorDictSequential:
    """Build the policy of one group; see :func:`make_policy`."""
    head_options = HeadOptions(
        group=name,
        agents=group.agents,
        return_log_prob=options.return_log_prob,
        default_interaction_type=options.default_interaction_type,
    )
    leaves = observation_leaves(group.observation, (name, "observation"))
    with torch.device(_device(options.device)):
        head = make_head(group, head_options, check_mask=options.check_mask)
        network = _network(leaves, head, group.n_agents, options)
    module = GroupModule(
        network,
        in_keys=[leaf.key for leaf in leaves],
        out_keys=[key for key in head.in_keys if key[-1] != "action_mask"],
        group=name,
        check_finite=options.check_finite,
    )
    return ProbabilisticTensorDictSequential(module, head)


def make_head(
    group: GroupDescription,
    options: HeadOptions | None = None,
    *,
    check_mask: bool = True,
) -> ActionHead:
    """Build the head that a group's action space asks for; see :func:`make_policy`.

    Raises:
        TypeError: if there is none for the space.
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
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        if np.isfinite(space.low).all() and np.isfinite(space.high).all():
            return TanhNormalHead(space.low.tolist(), space.high.tolist(), options)
        return NormalHead(space.shape[0], options)
    raise TypeError(
        f"There is no head for the action space {space} of group {options.group!r}: "
        "expected Discrete, or MultiDiscrete, MultiBinary and Box of one dimension. "
        "Build the policy by hand: a network that writes the parameters, and a "
        "ProbabilisticTensorDictModule."
    )


@final
class GroupModule(TensorDictModuleBase):
    """A network on the keys of one group, whose errors name the group and the keys.

    Args:
        module: called with the values of ``in_keys``, returns those of ``out_keys``.
        in_keys: what to read.
        out_keys: where to write.
        group: for messages.
        check_finite: whether an output that is not finite is an error.
    """

    pure_forward = True

    def __init__(
        self,
        module: nn.Module,
        in_keys: Sequence[Key],
        out_keys: Sequence[Key],
        *,
        group: str,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.in_keys = list(in_keys)
        self.out_keys = list(out_keys)
        self.group = group
        self.check_finite = check_finite

    @dispatch(auto_batch_size=False)  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read, compute, write; returns ``tensordict``.

        Raises:
            KeyError: naming the keys that are missing.
            ValueError: what the network says about its input, or which output is not
                finite, with the group's name.
        """
        values = [tensordict.get(key, None) for key in self.in_keys]
        if any(value is None for value in values):
            raise KeyError(self._missing(values, tensordict))
        try:
            out = self.module(*values)
        except ValueError as error:
            where = f"Group {self.group!r}, input {show_keys(self.in_keys)}"
            raise ValueError(f"{where}: {error}") from error
        outputs = out if isinstance(out, tuple) else (out,)
        for key, value in zip(self.out_keys, outputs, strict=True):
            if self.check_finite and not value.isfinite().all():
                raise ValueError(self._not_finite(key, value))
            tensordict.set(key, value)
        return tensordict

    def _missing(self, values: Sequence[Any], tensordict: TensorDictBase) -> str:
        pairs = zip(self.in_keys, values, strict=True)
        missing = [key for key, value in pairs if value is None]
        return (
            f"The network of group {self.group!r} needs {show_keys(missing)}, but "
            f"found {show_keys(tensordict.keys(True, True))}. Change in_keys, or what "
            "the environment observes."
        )

    def _not_finite(self, key: Key, value: Tensor) -> str:
        wrong = ~value.isfinite()
        index = wrong.nonzero()[0].tolist()
        return (
            f"The network of group {self.group!r} wrote {int(wrong.sum())} numbers "
            f"that are not finite to {show_keys([key])}, the first of them "
            f"{value[tuple(index)].item()} at {index}: expected finite numbers. Look "
            "at the observation there and at the weights (a learning rate too high?)."
        )


@final
class GroupNetwork(nn.Module):
    """Encodes images and numbers of an observation, then maps them to outputs.

    Args:
        leaves: the arrays of the observation.
        head: reads the outputs.
        n_agents: agents of the group.
        options: see :class:`PolicyOptions`. Images are always seen by each agent for
            itself; ``centralised`` joins what the convolutions made of them.
    """

    pure_forward = True

    def __init__(
        self,
        leaves: Sequence[Leaf],
        head: ActionHead,
        n_agents: int,
        options: PolicyOptions,
    ) -> None:
        super().__init__()
        self.is_image = [leaf.kind == "image" for leaf in leaves]
        images = [leaf for leaf in leaves if leaf.kind == "image"]
        vectors = [leaf for leaf in leaves if leaf.kind != "image"]
        self.vectors = VectorInput(vectors) if vectors else None
        n_features = self.vectors.n_features if self.vectors else 0
        self.images = nn.ModuleList()
        for leaf in images:
            conv = _convolutions(leaf, n_agents, options)
            self.images.append(conv)
            n_features += _n_features(conv, leaf, n_agents)
        self.mlp = _mlp(n_features, head, n_agents, options)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Map arrays ``[*B, n_agents, *shape]`` to what the head reads."""
        pairs = list(zip(self.is_image, values, strict=True))
        images = [value for is_image, value in pairs if is_image]
        features = [
            conv(image) for conv, image in zip(self.images, images, strict=True)
        ]
        if self.vectors is not None:
            features.append(self.vectors(*(v for is_image, v in pairs if not is_image)))
        out: Tensor | tuple[Tensor, Tensor] = self.mlp(torch.cat(features, -1))
        return out


def description_of(what: Any) -> EnvDescription:
    """Return the description that ``what`` is, has, or leads to.

    Raises:
        TypeError: if it does not.
    """
    if isinstance(what, EnvDescription):
        return what
    own = getattr(what, "description", None)
    if isinstance(own, EnvDescription):
        return own
    if callable(what):
        from marl_collect.inspection import describe

        return describe(what)
    raise TypeError(
        "Expected an environment, a factory of one, or what describe(factory) returns, "
        f"but found {what!r} of type {type(what).__name__}."
    )


def _network(
    leaves: Sequence[Leaf], head: ActionHead, n_agents: int, options: PolicyOptions
) -> nn.Module:
    if len(leaves) == 1 and leaves[0].is_plain:
        return _mlp(leaves[0].size, head, n_agents, options)
    return GroupNetwork(leaves, head, n_agents, options)


def _mlp(
    n_inputs: int, head: ActionHead, n_agents: int, options: PolicyOptions
) -> nn.Module:
    network = MultiAgentMLP(
        n_inputs,
        head.n_outputs,
        n_agents,
        centralised=options.centralised,
        share_params=options.share_params,
        num_cells=options.num_cells,
        activation_class=options.activation_class,
    )
    return nn.Sequential(network, LocScale()) if head.needs_scale else network


def _convolutions(leaf: Leaf, n_agents: int, options: PolicyOptions) -> nn.Sequential:
    conv = MultiAgentConvNet(
        n_agents,
        centralised=False,
        share_params=options.share_params,
        in_features=leaf.size,
        **options.conv,
    )
    return nn.Sequential(ImageInput(channels_last=leaf.channels_last), conv)


def _n_features(conv: nn.Module, leaf: Leaf, n_agents: int) -> int:
    """Find what a network of convolutions makes of an image, without computing it."""
    weights = {name: tensor.to("meta") for name, tensor in conv.state_dict().items()}
    image = torch.empty(1, n_agents, *leaf.shape, device="meta")
    out: Tensor = torch.func.functional_call(conv, weights, (image,))
    return out.shape[-1]


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(torch.get_default_device() if device is None else device)
