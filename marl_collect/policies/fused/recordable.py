"""Determines which policies compute their outputs from inputs and weights alone.

Recorded operations can be repeated for modules that keep no state: no counter, no
clock, no random numbers except torch's. The layers of torch and the modules of
tensordict qualify, and so do the networks, actors and exploration modules of TorchRL
and BenchMARL. Functions qualify if their code proves it (``pure_functions.py``). Other
modules declare it with ``pure_forward = True``, as our networks and heads do. All other
policies are called once per frame.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import nn

from marl_collect.policies.fused.pure_functions import outer_values, why_not_pure

PURE = "pure_forward"
"""The attribute with which a module, function or distribution declares to be pure."""

_UNSAID = (
    "is not declared as pure: if it computes from inputs and weights alone, set "
    f"{PURE} = True on it"
)

_PURE_MODULES = (
    "torch.nn.modules.",
    "tensordict.nn.common",
    "tensordict.nn.sequence",
    "tensordict.nn.probabilistic",
    "tensordict.nn.distributions.",
    "tensordict.nn.params",
    "tensordict.nn.utils",
    "torchrl.modules.models.models",
    "torchrl.modules.models.multiagent",
    "torchrl.modules.models.utils",
    "torchrl.modules.tensordict_module.actors",
    "torchrl.modules.tensordict_module.exploration",
    "torchrl.modules.tensordict_module.probabilistic",
    "torchrl.modules.tensordict_module.sequence",
    "benchmarl.models.cnn",
    "benchmarl.models.common",
    "benchmarl.models.mlp",
)
_PURE_DISTRIBUTIONS = (
    "torch.distributions.",
    "tensordict.nn.distributions.",
    "torchrl.modules.distributions.",
)
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (OrderedDict, dict, set, list, tuple)
_PURE_HOOKS = {
    # Projects actions to their space, for `safe=True`.
    "torchrl.modules.tensordict_module.common._forward_hook_safe_action",
}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def why_not_recordable(policy: Any) -> str | None:
    """Return why ``policy`` cannot be recorded; None if it can."""
    if not isinstance(policy, nn.Module):
        return None if says_pure(policy) else f"{_name(policy)} {_UNSAID}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    for path, module in policy.named_modules():
        reason = _problem(module)
        if reason is not None:
            return f"{path or 'the policy'} ({_name(module)}) {reason}"
    return None


def says_pure(thing: Any) -> bool:
    """Return whether ``thing`` declares that its ``forward`` is pure."""
    return declares(thing, PURE)


def declares(thing: Any, attribute: str) -> bool:
    """Return whether an attribute about ``forward`` is True.

    A subclass that overrides ``forward`` has to declare it again.
    """
    if getattr(thing, attribute, False) is not True:
        return False
    for kind in type(thing).__mro__ if isinstance(thing, nn.Module) else ():
        if attribute in vars(kind):
            return True
        if "forward" in vars(kind):
            return attribute in vars(thing)
    return True


def state_of(policy: Any) -> list[Any]:
    """Return the state that a recording depends on; it is valid while this is equal.

    The state consists of Python attributes (training mode, a temperature) and of the
    addresses of tensors. It excludes the tensors' values, which every run reads.
    """
    if not isinstance(policy, nn.Module):
        return [id(policy)]
    marks: list[Any] = [torch.is_autocast_enabled("cpu")]
    for module in policy.modules():
        for name, value in vars(module).items():
            if name == "noise":
                continue
            # Most values are plain or empty; calling _mark for them doubles the time.
            kind = type(value)
            if kind in _PLAIN:
                marks.append(value)
            elif kind not in _CONTAINERS or value:
                _mark(value, marks, 2)
        if isinstance(module, TensorDictModule):
            for value in outer_values(module.module):
                _mark(value, marks, 1)
    return marks


def _mark(value: Any, marks: list[Any], depth: int) -> None:
    kind = type(value)
    if kind in _PLAIN:
        marks.append(value)
    elif isinstance(value, torch.Tensor):
        marks.append((id(value), value.data_ptr()))
    elif depth and isinstance(value, dict):
        for key, inner in value.items():
            marks.append(key)
            _mark(inner, marks, depth - 1)
    elif depth and kind in (list, tuple):
        for inner in value:
            _mark(inner, marks, depth - 1)
    else:
        marks.append(id(value))


def _problem(module: nn.Module) -> str | None:
    if not all(map(_is_pure_hook, _hooks(module))):
        return "has hooks"
    for tensor in _own_tensors(module):
        if tensor.device.type != "cpu":
            return f"is on {tensor.device}"
    if not says_pure(module) and not _from(type(module), _PURE_MODULES):
        return _UNSAID
    if isinstance(module, ProbabilisticTensorDictModule) and not says_pure(module):
        kind = _unwrapped(module.distribution_class)
        if not says_pure(kind) and not _from(kind, _PURE_DISTRIBUTIONS):
            return f"samples from {_name(kind)}, which {_UNSAID}"
    if isinstance(module, TensorDictModule):
        return _problem_of_call(module.module)
    return None


def _problem_of_call(function: Any) -> str | None:
    called = _unwrapped(function)
    if isinstance(called, nn.Module) or says_pure(called):
        return None
    reason = why_not_pure(function)
    return reason and f"calls {_name(called)}, which {reason}, and {_UNSAID}"


def _hooks(module: nn.Module) -> Iterator[Any]:
    for name in _HOOKS:
        yield from (getattr(module, name, None) or {}).values()


def _is_pure_hook(hook: Any) -> bool:
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    return f"{home}.{name}" in _PURE_HOOKS


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _unwrapped(thing: Any) -> Any:
    while isinstance(thing, partial):
        thing = thing.func
    return thing


def _from(kind: Any, homes: tuple[str, ...]) -> bool:
    return f"{getattr(kind, '__module__', '')}.".startswith(homes)


def _name(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    return str(getattr(thing, "__qualname__", None) or type(thing).__name__)
