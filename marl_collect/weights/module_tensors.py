"""Finds and replaces the tensors of a module.

These are its parameters and buffers (including non-persistent ones), tensors that are
plain attributes, and the entries of tensordict's ``TensorDictParams``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class Slot:
    """A place in a module that holds a tensor."""

    path: str
    module: nn.Module
    name: str

    def get(self) -> Tensor:
        """Return the current tensor."""
        if isinstance(self.module, TensorDictParams):
            tensor: Tensor = self.module.get(tuple(self.name.split(".")))
            return tensor
        found: Tensor = getattr(self.module, self.name)
        return found

    def set(self, tensor: Tensor) -> None:
        """Replace the tensor; not for TensorDictParams (use ``map_tensors``)."""
        # Module.__setattr__ keeps parameters and buffers apart, and updates an RNN's
        # list of flat weights.
        setattr(self.module, self.name, tensor)


def is_meta(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on the meta device."""
    return tensor.device.type == "meta"


def slots(module: nn.Module) -> Iterator[Slot]:
    """Yield every place that holds a tensor; a shared tensor has several places."""
    templates = _template_paths(module)
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, _ in child.named_parameters(recurse=False, remove_duplicate=False):
            yield Slot(dot + name, child, name)
        for name, _ in child.named_buffers(recurse=False, remove_duplicate=False):
            yield Slot(dot + name, child, name)
        if isinstance(child, TensorDictParams):
            continue
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and dot + name not in templates:
                yield Slot(dot + name, child, name)


def map_tensors(module: nn.Module, fn: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every tensor of ``module`` by ``fn(path, tensor)``."""
    for slot in list(slots(module)):
        if not isinstance(slot.module, TensorDictParams):
            old = slot.get()
            new = fn(slot.path, old)
            if new is not old:
                slot.set(new)
    for prefix, owner in list(module.named_modules()):
        for name, params in list(owner.named_children()):
            if isinstance(params, TensorDictParams):
                path = f"{prefix}.{name}" if prefix else name
                setattr(owner, name, _map_params(params, path, fn))


def replace(
    tensor: Tensor, memo: dict[int, Tensor], device: str, *, zero: bool = False
) -> Tensor:
    """Return an uninitialised tensor like ``tensor`` on ``device``.

    The same tensor gets the same replacement, so shared tensors stay shared. A tensor
    that is on ``device`` already is returned unchanged.
    """
    if is_lazy(tensor):
        # It has no memory until its shape is known; this only sets its device.
        return memo.setdefault(id(tensor), _lazy_on(tensor, device))
    if tensor.device.type == device:
        return tensor
    found = memo.get(id(tensor))
    if found is None:
        found = _empty_like(tensor, device)
        if zero:
            with torch.no_grad():
                found.zero_()
        memo[id(tensor)] = found
    return found


def _template_paths(module: nn.Module) -> set[str]:
    """Return the paths of meta tensors that stand in for a sibling's parameters.

    A functional module (TorchRL's multi-agent networks) holds its parameters in a
    TensorDictParams, next to a template whose own tensors stay on the meta device.
    """
    paths: set[str] = set()
    for prefix, owner in module.named_modules():
        children = dict(owner.named_children())
        for params in children.values():
            if not isinstance(params, TensorDictParams):
                continue
            keys = [".".join(_as_tuple(k)) for k in params.keys(True, True)]
            dot = f"{prefix}." if prefix else ""
            paths.update(f"{dot}{c}.{key}" for c in children for key in keys)
    return paths


def _as_tuple(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _map_params(
    params: TensorDictParams, path: str, fn: Callable[[str, Tensor], Tensor]
) -> TensorDictParams:
    changed = TensorDict({}, batch_size=params.batch_size)
    for key, value in params.items(True, True):
        changed[key] = fn(".".join((path, *_as_tuple(key))), value)
    return TensorDictParams(changed, no_convert=True)


def _lazy_on(tensor: Tensor, device: str) -> Tensor:
    if tensor.device.type == device:
        return tensor
    kwargs: dict[str, Any] = {"device": device, "dtype": tensor.dtype}
    if isinstance(tensor, nn.Parameter):
        kwargs["requires_grad"] = tensor.requires_grad
    return type(tensor)(**kwargs)


def _empty_like(tensor: Tensor, device: str) -> Tensor:
    empty = torch.empty_like(tensor.detach().to("meta"), device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
