"""Converts a user's policy to a callable on TensorDicts."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from typing_extensions import override

from marl_collect.core.description import EnvDescription, Key

_TENSORDICT_NAMES = {"td", "tensordict", "tensordict_in", "data"}


def on_tensordicts(policy: Any, description: EnvDescription) -> Any:
    """Return ``policy`` itself if it takes TensorDicts, else a module around it.

    A module or function is wrapped if its arguments have the names of observations,
    such as ``observation`` if only one group has that key. Its results are the groups'
    actions, in order. Further results are at ``"output1"``, ``"output2"``, ..., as in
    TorchRL.

    Raises:
        TypeError: if the arguments are neither; shows how to wrap the policy.
    """
    arguments = _arguments(policy)
    is_module = hasattr(policy, "in_keys") and hasattr(policy, "out_keys")
    if is_module or _takes_tensordict(policy, arguments):
        return policy
    in_keys = [_key_called(a.name, description) for a in arguments or ()]
    if not in_keys or None in in_keys:
        raise TypeError(_refusal(policy, arguments, description))
    return _Plain(policy, in_keys=in_keys, out_keys=list(description.actions()))


def built_policy(factory: Callable[[], Any]) -> Any:
    """Return the policy that a factory builds.

    Raises:
        TypeError: if it returns None, which would silently mean random actions.
    """
    policy = factory()
    if policy is None:
        raise TypeError(
            "policy_factory returned None: return the policy, or leave policy_factory "
            "out for random actions."
        )
    return policy


@final
class _Plain(TensorDictModule):
    """A module that may return more than its ``out_keys``."""

    @override
    def _write_to_tensordict(
        self,
        tensordict: TensorDictBase,
        tensors: list[torch.Tensor],
        tensordict_out: TensorDictBase | None = None,
        out_keys: Iterable[Any] | None = None,
    ) -> TensorDictBase:
        keys = list(self.out_keys if out_keys is None else out_keys)
        further = range(1, len(tensors) - len(keys) + 1)
        keys += [f"output{number}" for number in further]
        return super()._write_to_tensordict(tensordict, tensors, tensordict_out, keys)


def _arguments(policy: Any) -> list[inspect.Parameter] | None:
    """Return the required arguments, or None if they cannot be determined."""
    function: Callable[..., Any] = (
        policy.forward if isinstance(policy, nn.Module) else policy
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [p for p in parameters if p.default is p.empty]


def _takes_tensordict(policy: Any, arguments: list[inspect.Parameter] | None) -> bool:
    if arguments is None:
        return not isinstance(policy, nn.Module)
    if len(arguments) != 1:
        return False
    only = arguments[0]
    kind = only.annotation
    if isinstance(kind, str):
        return "TensorDict" in kind
    if isinstance(kind, type) and kind not in (inspect.Parameter.empty, Any):
        return issubclass(kind, TensorDictBase)
    return only.name in _TENSORDICT_NAMES


def _key_called(name: str, description: EnvDescription) -> Key | None:
    """Return the observed key that ends in ``name``, if there is exactly one."""
    observed = [key for key in description.observed() if key[-1] == name]
    return observed[0] if len(observed) == 1 else None


def _refusal(
    policy: Any, arguments: list[inspect.Parameter] | None, description: EnvDescription
) -> str:
    names = "*args" if arguments is None else [a.name for a in arguments]
    observed = [key for key in description.observed() if "observation" in key]
    actions = list(description.actions())
    name = getattr(policy, "__name__", type(policy).__name__)
    if arguments == []:
        return (
            f"The policy {name} takes no arguments. If it builds the policy, pass it "
            "as policy_factory, or what it returns as the policy; otherwise let it "
            "take one TensorDict."
        )
    if arguments is None and isinstance(getattr(policy, "module", None), nn.Module):
        return (
            f"The policy {name} is a wrapper that takes any arguments. Pass what it "
            "wraps, policy.module, whose weights are the same."
        )
    return (
        f"The policy {name} takes {names}, which are not observations of "
        f"{description.name}. Wrap it: TensorDictModule(policy, in_keys="
        f"{observed}, out_keys={actions}); or let it take one argument annotated as "
        "TensorDict."
    )
