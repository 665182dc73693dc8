"""Determines which policies compute their outputs from inputs and weights alone.

Recorded operations can be repeated for modules that keep no state: no counter, no
clock, no random numbers except torch's. The layers of torch and the modules of
tensordict qualify, and so do the networks, actors and exploration modules of TorchRL
and BenchMARL. Operations of torch qualify, too. Other modules and functions declare it
with ``pure_forward = True``, as our networks and heads do. All other policies are
called once per frame.
"""

from functools import partial
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import nn

from marl_collect.weights.state import ModuleState

PURE = "pure_forward"
"""The attribute with which a module, function or distribution declares to be pure."""

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
    "torchrl.modules.tensordict_module.rnn",
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
_OPERATIONS = (
    torch._C._VariableFunctions,  # noqa: SLF001 - functions such as torch.cat
    torch.functional,
    torch.nn.functional,
    torch.special,
    torch.linalg,
)
_PURE_HOOKS = {
    # Projects actions to their space, for `safe=True`.
    "torchrl.modules.tensordict_module.common._forward_hook_safe_action",
}


def why_not_recordable(policy: Any, state: ModuleState | None = None) -> str | None:
    """Return why ``policy`` cannot be recorded; None if it can.

    Args:
        policy: a callable on TensorDicts.
        state: of the policy, to check that all of it can be compared.
    """
    reason = _why_not_pure(policy)
    if reason is None and state is not None:
        unseen = state.unseen()
        if unseen is not None:
            reason = (
                f"changes of {unseen} cannot be seen: keep plain values, tensors or "
                "objects with attributes instead"
            )
    return reason


def _why_not_pure(policy: Any) -> str | None:
    if not isinstance(policy, nn.Module):
        return None if says_pure(policy) else f"{_name(policy)} {_unsaid('')}"
    if type(policy).__module__.startswith("torch._dynamo"):
        return (
            "torch.compile has compiled it; recording it instead is usually faster: "
            "omit compile_policy"
        )
    problems: dict[str, str] = {}
    for path, module in policy.named_modules():
        reason = _problem(module, path)
        if reason is not None:
            # The user's own modules come before ours.
            owner = "ours" if _from(type(module), ("marl_collect.",)) else "theirs"
            text = f"{path or 'the policy'} ({_name(module)}) {reason}"
            problems.setdefault(owner, text)
    return problems.get("theirs", problems.get("ours"))


def _unsaid(path: str) -> str:
    return (
        "is not declared as pure: if it computes from inputs and weights alone, add "
        f"the line {_expression(path)}.{PURE} = True"
    )


def _expression(path: str) -> str:
    """Return the Python expression of a submodule."""
    text = "policy"
    for name in filter(None, path.split(".")):
        text += f".{name}" if name.isidentifier() else f"[{name}]"
    return text


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


def _problem(module: nn.Module, path: str) -> str | None:
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        hooks = getattr(module, f"_{kind}_hooks", None) or {}
        if not all(map(_is_pure_hook, hooks.values())):
            return "has hooks"
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.device.type != "cpu":
            return f"is on {tensor.device}"
    if says_pure(module):
        return None
    if not _from(type(module), _PURE_MODULES):
        return _unsaid(path)
    return _problem_of_call(module, path)


def _problem_of_call(module: nn.Module, path: str) -> str | None:
    """Check the function or distribution that a module of a library calls."""
    if isinstance(module, ProbabilisticTensorDictModule):
        kind = _unwrapped(module.distribution_class)
        if not says_pure(kind) and not _from(kind, _PURE_DISTRIBUTIONS):
            return f"samples from {_name(kind)}, which {_unsaid(path)}"
    if isinstance(module, TensorDictModule):
        called = _unwrapped(module.module)
        known = isinstance(called, nn.Module) or _is_operation(called)
        if not known and not says_pure(called):
            return f"calls {_name(called)}, which {_unsaid(path)}"
    return None


def _is_operation(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return any(getattr(holder, name, None) is function for holder in _OPERATIONS)


def _is_pure_hook(hook: Any) -> bool:
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    return f"{home}.{name}" in _PURE_HOOKS


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
