"""Base classes of multi-agent networks: one network per agent, or a shared one.

``centralised`` and ``share_params`` are independent of each other:

================  =================================  ================================
                  ``share_params=True``              ``share_params=False``
================  =================================  ================================
not centralised   one network, applied to each       one network per agent,
                  agent's input                      applied to its own input
centralised       one network, applied to all        one network per agent,
                  inputs; all agents get its output  applied to all inputs
================  =================================  ================================
"""

import abc
import copy
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from marl_collect.models.layers.linear import reset_parameters
from marl_collect.models.layers.stacking import (
    run_layers,
    stack_agents,
    torch_layout,
    unstack_agent,
)
from marl_collect.options import Option, require

_TORCHRL_PREFIXES = ("params.", "_empty_net.")
SIZE: Final = Option("", at_least=1)
"""Of a number of agents, units or layers."""
FEATURES: Final = Option("", at_least=0)
"""Of a number of features, which spaces may lack."""


class AgentNetworks(nn.Module, abc.ABC):
    """Owns the weights of ``n_agents`` networks, or of the one that they share.

    Attributes:
        net: the shared network, or the stacked networks. The linear layers of the
            latter are ``StackedLinear``, with weights ``[n_agents, in, out]`` and
            biases ``[n_agents, 1, out]``.
    """

    net: nn.Module

    def __init__(
        self,
        *,
        n_agents: int,
        centralised: bool | None,
        share_params: bool | None,
        centralized: bool | None,
    ) -> None:
        """Check the arguments.

        Raises:
            TypeError: if an argument has another type, ``share_params`` is missing, or
                both spellings of ``centralised`` are passed, or none.
            ValueError: if there are no agents.
        """
        super().__init__()
        if (centralised is None) == (centralized is None):
            raise TypeError(
                "Pass either centralised or centralized, True or False, but found "
                f"centralised={centralised} and centralized={centralized}."
            )
        if share_params is None:
            raise TypeError("Pass share_params=True or share_params=False.")
        sees_all = centralized if centralised is None else centralised
        self.n_agents: int = require("n_agents", n_agents, int, SIZE)
        self.centralised: bool = require("centralised", sees_all, bool, Option(""))
        self.share_params: bool = require(
            "share_params", share_params, bool, Option("")
        )

    @property
    def centralized(self) -> bool:
        """The same as ``centralised``, in TorchRL's spelling."""
        return self.centralised

    @property
    def is_shared_and_decentralised(self) -> bool:
        """Whether one network maps each agent's input to this agent's output."""
        return self.share_params and not self.centralised

    def _build(self, device: torch.device | str | None, **kwargs: Any) -> nn.Module:
        count = 1 if self.share_params else self.n_agents
        singles = [
            self._build_single_net(device=device, **kwargs) for _ in range(count)
        ]
        if self.share_params:
            return singles[0]
        return stack_agents(singles)

    @abc.abstractmethod
    def _build_single_net(
        self, *, device: torch.device | str | None, **kwargs: Any
    ) -> nn.Module:
        """Build one agent's network.

        Args:
            device: device of its tensors; ``None`` is torch's default device.
            **kwargs: the constructor's additional arguments.
        """

    def get_stateful_net(self, agent: int | None = None) -> nn.Module:
        """Return plain torch networks that share memory with this one.

        Initialising them in place, for example with ``torch.nn.init``, changes this
        network. They have the shapes, and therefore the fans, of single networks.

        Args:
            agent: index of the agent; ``None`` returns the shared network, or a
                ``ModuleList`` with one network per agent.

        Returns:
            Networks that can be called on a single agent's input. Gradients through
            them reach this module's parameters only if ``share_params`` is True.
        """
        self._check_known("get_stateful_net()")
        if self.share_params:
            if agent is not None:
                self._check_agent(agent)
            # The memo makes deepcopy() keep the parameters instead of copying them.
            memo: dict[int, Any] = {id(p): p for p in self.net.parameters()}
            memo |= {id(b): b for b in self.net.buffers()}
            return copy.deepcopy(self.net, memo)
        if agent is not None:
            self._check_agent(agent)
            return unstack_agent(self.net, agent)
        agents = range(self.n_agents)
        return nn.ModuleList([unstack_agent(self.net, index) for index in agents])

    def from_stateful_net(self, net: nn.Module, agent: int | None = None) -> None:
        """Copy the values of ``net`` into this network.

        Args:
            net: a network with the structure of ``get_stateful_net(agent)``.
            agent: agent whose network is replaced; ``None`` replaces all.

        Raises:
            ValueError: if its tensors have other names or shapes.
        """
        targets = named_tensors(self.get_stateful_net(agent))
        copy_into(targets, named_tensors(net), "the given network")

    def keep_agent(self, agent: int) -> None:
        """Become the network of one agent, on the same tensors.

        Its input has one agent from now on, and ``n_agents`` is 1.

        Args:
            agent: index of the agent.

        Raises:
            ValueError: if the network is centralised, because it reads all agents.
        """
        if self.centralised:
            raise ValueError(f"{self} reads the inputs of all agents.")
        self.net = self.get_stateful_net(None if self.share_params else agent)
        self.n_agents, self.share_params = 1, True

    def reset_parameters(self, agent: int | None = None) -> None:
        """Initialise the weights again, independently for each agent.

        Args:
            agent: agent whose weights are initialised; ``None`` is all agents.
        """
        if self.share_params:
            if agent is not None:
                self._check_agent(agent)
            reset_parameters(self.net)
        else:
            agents = range(self.n_agents) if agent is None else [agent]
            for index in agents:
                self._check_agent(index)
                reset_parameters(unstack_agent(self.net, index))

    @override
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Name the converter if these are the weights of TorchRL's network."""
        theirs = tuple(prefix + name for name in _TORCHRL_PREFIXES)
        if any(key.startswith(theirs) for key in state_dict):
            *_, messages = args
            messages.append(
                f"{prefix[:-1] or 'This network'} gets the weights of TorchRL's "
                f"{type(self).__name__}. Load them with "
                "network.load_torchrl_state_dict(torchrl_network.state_dict())."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_torchrl_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the weights of TorchRL's network of the same name and arguments.

        Args:
            state_dict: ``network.state_dict()`` of TorchRL, with ``use_td_params`` on
                (keys ``params.0.weight``) or off (``_empty_net.0.weight``). Its
                unshared weights are ``[n_agents, out, in]``.

        Raises:
            ValueError: if names or shapes differ; lists the differences.
        """
        self._check_known("load_torchrl_state_dict()")
        values = {
            key.split(".", 1)[1]: value
            for key, value in state_dict.items()
            if key.startswith(_TORCHRL_PREFIXES)
        }
        shared = self.share_params
        targets = named_tensors(self.net) if shared else torch_layout(self.net)
        copy_into(targets, values, "TorchRL's state_dict")

    def _check_agent(self, agent: int) -> None:
        if not 0 <= agent < self.n_agents:
            raise ValueError(
                f"agent must be from 0 to {self.n_agents - 1}, but is {agent}."
            )

    def _check_known(self, what: str) -> None:
        if any(is_lazy(p) for p in self.parameters()):
            raise ValueError(
                f"{what} needs the shapes of all weights, but this network is lazy: "
                "pass the input size to the constructor, or run the network once."
            )

    @override
    def extra_repr(self) -> str:
        return (
            f"n_agents={self.n_agents}, centralised={self.centralised}, "
            f"share_params={self.share_params}"
        )


class MultiAgentNetBase(AgentNetworks):
    """A feed-forward network for all agents of a group.

    Subclasses build a single agent's network in ``_build_single_net``. This class
    stacks the networks and arranges their inputs and outputs. A subclass must set
    attributes that ``_build_single_net`` reads before it calls ``super().__init__()``.

    Attributes:
        n_features: size of the first feature dimension of one agent's input, from the
            constructor or from the first input.

    Args:
        n_agents: number of agents, which is the size of ``agent_dim``.
        centralised: whether each agent sees the inputs of all agents, concatenated
            along the first feature dimension.
        share_params: whether all agents share one network.
        agent_dim: the agent dimension of the input; dimensions before it are batch
            dimensions, dimensions after it are features.
        device: device of the weights.
        centralized: the same as ``centralised``.
        **kwargs: passed to ``_build_single_net``.
    """

    pure_forward = True
    by_row = AgentNetworks.is_shared_and_decentralised

    def __init__(
        self,
        *,
        n_agents: int,
        centralised: bool | None = None,
        share_params: bool | None = None,
        agent_dim: int = -2,
        device: torch.device | str | None = None,
        centralized: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            n_agents=n_agents,
            centralised=centralised,
            share_params=share_params,
            centralized=centralized,
        )
        self.agent_dim = agent_dim
        self.n_features: int | None = None
        self.net = self._build(device, **kwargs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute every agent's output.

        Args:
            *inputs: ``[*B, n_agents, *features]``. Several inputs are concatenated
                along their last dimension.

        Returns:
            ``[*B, n_agents, *outputs]``; not a view that repeats rows.

        Raises:
            ValueError: for a wrong number of agents, feature size, dtype or device.
        """
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        shape = x.shape
        dim = self.agent_dim
        if dim < 0:
            dim += len(shape)
        if not 0 <= dim < len(shape) - 1 or shape[dim] != self.n_agents:
            raise ValueError(
                f"{type(self).__name__} expected an input [*B, n_agents, *features] "
                f"with n_agents={self.n_agents} at dimension {self.agent_dim}, but "
                f"found the shape {list(shape)}."
            )
        try:
            out = self._shared(x, dim) if self.share_params else self._unshared(x, dim)
        except RuntimeError as error:
            self._explain(x, dim, error)
            raise
        if out.is_meta and not x.is_meta:
            # On meta, batched products accept inputs from any device silently.
            self._explain(x, dim, None)
        if self.n_features is None:
            self.n_features = shape[dim + 1]
        return out

    def _shared(self, x: Tensor, dim: int) -> Tensor:
        lead = x.shape[:dim]
        if not self.centralised:
            out = run_layers(self.net, _flatten(x, dim + 1))
            return out if dim == 0 else out.unflatten(0, (*lead, self.n_agents))
        x = x.flatten(dim, dim + 1)
        out = _unflatten(run_layers(self.net, _flatten(x, dim)), 0, lead)
        shape = (*lead, self.n_agents, *out.shape[dim:])
        # A copy, because an expanded view does not allow in-place writes.
        return out.unsqueeze(dim).expand(shape).contiguous()

    def _unshared(self, x: Tensor, dim: int) -> Tensor:
        shape = x.shape
        # At batch size 1, the attribute self.net costs as much as an activation.
        net: Any = self._modules["net"]
        if self.centralised:
            # One input for all agents; the first layer with weights expands it.
            rows = shape[0] if dim == 1 else math.prod(shape[:dim])
            x = x.reshape(1, rows, shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        elif dim == 0:
            x = x.unsqueeze(1)
        else:
            x = _flatten(x, dim).transpose(0, 1)
        out = run_layers(net, x)
        if out.shape[0] != self.n_agents:
            out = out.expand(self.n_agents, *out.shape[1:])
        if dim == 1:
            return out.transpose(0, 1)
        return _unflatten(out, 1, shape[:dim]).movedim(0, dim)

    def _explain(self, x: Tensor, dim: int, error: RuntimeError | None) -> None:
        """Raise a helpful error if features, device or dtype of the input are wrong."""
        name = type(self).__name__
        if self.n_features is not None and x.shape[dim + 1] != self.n_features:
            raise ValueError(
                f"{name} expected {self.n_features} features per agent, but found "
                f"{x.shape[dim + 1]} in an input of shape {list(x.shape)}."
            ) from error
        weight = next(self.parameters(), None)
        if weight is None or is_lazy(weight):
            return
        if weight.device != x.device:
            raise self._other_device(weight, x) from error
        if weight.dtype != x.dtype:
            raise ValueError(
                f"{name} expected an input of dtype {weight.dtype}, but found "
                f"{x.dtype}. Convert the observation, or the network with .to()."
            ) from error

    def _other_device(self, weight: Tensor, x: Tensor) -> ValueError:
        """Return the error for an input on another device than the weights."""
        hint = (
            "Materialize it first: materialize(network), or use collector.policy."
            if weight.is_meta
            else "Move one of them with .to()."
        )
        return ValueError(
            f"{type(self).__name__} is on the device {weight.device}, but its input is "
            f"on {x.device}. {hint}"
        )


def _flatten(x: Tensor, dims: int) -> Tensor:
    """Flatten the first ``dims`` dimensions; 0 adds one. The tensor may be empty."""
    if dims == 1:
        return x
    return x.unsqueeze(0) if dims == 0 else x.flatten(0, dims - 1)


def _unflatten(x: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return x
    return x.squeeze(dim) if len(shape) == 0 else x.unflatten(dim, shape)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, detached."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def copy_into(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], source: str
) -> None:
    """Copy values by name; raise a ValueError that lists all differences.

    Only tensors count: tensordict before 0.12 saved batch size and device too.
    """
    values = {
        name: value for name, value in values.items() if isinstance(value, Tensor)
    }
    missing = sorted(targets.keys() - values.keys())
    unknown = sorted(values.keys() - targets.keys())
    shapes = [
        f"{key} is {list(values[key].shape)} and should be {list(targets[key].shape)}"
        for key in sorted(targets.keys() & values.keys())
        if targets[key].shape != values[key].shape
    ]
    if missing or unknown or shapes:
        raise ValueError(
            f"The tensors of {source} do not fit this network. Missing: {missing}; "
            f"unknown: {unknown}; wrong shapes: {shapes}."
        )
    for key, tensor in targets.items():
        tensor.copy_(values[key])
