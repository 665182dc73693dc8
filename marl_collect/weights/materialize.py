"""Gives weights to modules on the meta device and to lazy modules.

A policy built under ``torch.device("meta")`` needs no memory and is sent to a worker as
a few hundred bytes. ``infer_lazy`` infers the missing sizes of a lazy module.
``materialize`` allocates and initialises every tensor. Both return a copy and do not
change their argument.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from marl_collect.core.tensordicts import key_path
from marl_collect.weights.tensor_parts import copied_parts

# Layers of torch.nn with a private initialiser.
_PRIVATE_RESET = (nn.MultiheadAttention, nn.Transformer)

_replaced = WeakTensorKeyDictionary()
_guard_installed = False


def meta_tensors(module: nn.Module) -> list[str]:
    """Return the paths of all tensors of ``module`` on the meta device.

    These can be parameters, buffers (including non-persistent ones) and plain
    attributes.
    """
    return [path for path, tensor in _tensors(module).items() if tensor.is_meta]


def lazy_tensors(module: nn.Module) -> list[str]:
    """Return the paths of all parameters and buffers of ``module`` that are lazy."""
    return [path for path, tensor in _tensors(module).items() if is_lazy(tensor)]


def materialize(
    module: nn.Module,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> nn.Module:
    """Copy ``module``, with its meta tensors allocated and initialised.

    Each layer is initialised by its ``reset_parameters``, children before parents, as
    when the module is built. This happens on the CPU, so a seed gives the same weights
    on every device. Tensors that have values keep them. Shared tensors stay shared.

    Args:
        module: any module without lazy parameters (see ``infer_lazy``). It is not
            changed.
        device: of the copy.
        seed: makes the weights reproducible, and torch's global generator is not
            used. ``None`` draws from the global generator.

    Returns:
        A copy that shares no memory with ``module``.

    Raises:
        ValueError: if a parameter is lazy, or if no ``reset_parameters`` fills a meta
            tensor (it would contain uninitialised memory).
    """
    lazy = lazy_tensors(module)
    if lazy:
        raise ValueError(
            f"Cannot materialize a lazy module: the shapes of {lazy} are not known. "
            "Run infer_lazy(module, fake_tensordict) first, or pass the input sizes "
            "to the constructor."
        )
    result = copy_module(module)
    if _initialize(result, seed):
        _remember_replaced(module)
    return result.to(device)


def has_values(module: nn.Module) -> bool:
    """Return whether any parameter of ``module`` has values and can be trained."""
    return any(
        isinstance(tensor, nn.Parameter) and not tensor.is_meta and not is_lazy(tensor)
        for tensor in _tensors(module).values()
    )


def initialize(module: nn.Module) -> None:
    """Replace the meta tensors of ``module`` by initialised ones, without a copy.

    This is for a module whose tensors nobody else holds. The module is left incomplete
    if it fails. Values are drawn from the global generator. The new tensors get the
    device of the parameters that have values.

    Raises:
        ValueError: if nothing initialises a meta tensor.
    """
    devices = (p.device for p in module.parameters() if not p.is_meta)
    device = next(devices, torch.device("cpu"))
    if _initialize(module, None):
        module.to(device)


def infer_lazy(module: nn.Module, fake_tensordict: TensorDictBase) -> nn.Module:
    """Copy ``module`` and infer the shapes of its lazy parameters.

    The copy runs once on ``fake_tensordict``: on the meta device, or on the CPU if the
    meta device fails. Lazy parameters become meta tensors: they have a shape and no
    values, and ``materialize`` initialises them with its seed. All other tensors keep
    their device and values, including buffers that a forward pass updates.

    Args:
        module: takes a TensorDict, as policies do. It is not changed.
        fake_tensordict: an input of any batch size, with any legal values.

    Raises:
        ValueError: if the module fails on ``fake_tensordict``, or if parameters are
            still lazy afterwards.
    """
    unknown = set(lazy_tensors(module))
    if not unknown:
        return copy_module(module)
    ran = _run_once(module, fake_tensordict)
    left = lazy_tensors(ran)
    if left:
        raise ValueError(
            f"A forward pass did not reach the lazy parameters {left}. "
            "Pass their input sizes to the constructor."
        )
    known = _tensors(copy_module(module))
    memo: dict[int, Tensor] = {}

    def original(path: str, tensor: Tensor) -> Tensor:
        if path in unknown:
            return _replace(tensor, memo, "meta")
        return known.get(path, tensor)

    _map_tensors(ran, original)
    _remember_replaced(module)
    return ran


def _run_once(module: nn.Module, fake_tensordict: TensorDictBase) -> nn.Module:
    """Run a copy of ``module`` on the meta device, or on the CPU if that fails."""
    errors: list[Exception] = []
    for device in ("meta", "cpu"):
        ran = _zeroed_copy(module, device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                ran(fake_tensordict.to(device))
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            errors.append(error)
        else:
            return ran
    entries = {k: tuple(v.shape) for k, v in fake_tensordict.items(True, True)}
    raise ValueError(
        "Cannot infer the shapes of the lazy parameters "
        f"{lazy_tensors(module)}: the module fails on a fake input with the entries "
        f"{entries} ({type(errors[1]).__name__}: {errors[1]}; on "
        f"the meta device: {type(errors[0]).__name__}: {errors[0]}). Pass the input "
        "sizes to the constructor, or pass policy_factory to the collector instead of "
        "policy: it calls the module on real observations."
    ) from errors[1]


def _zeroed_copy(module: nn.Module, device: str) -> nn.Module:
    """Copy ``module`` to ``device``; tensors without values become zeros."""
    result = copy_module(module)
    memo: dict[int, Tensor] = {}
    _map_tensors(result, lambda _, t: _replace(t, memo, device, zero=True))
    return result


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module that may be lazy.

    Raises:
        ValueError: if it cannot be copied.
    """
    memo: dict[int, Any] = dict(copied_parts(module))

    def copied(path: str, tensor: Tensor) -> Tensor:
        del path
        if not is_lazy(tensor):
            return copy.deepcopy(tensor, memo)
        return memo.setdefault(id(tensor), _new_lazy(tensor, tensor.device.type))

    try:
        for path, params in module.named_modules():
            # Its own copies of lazy parameters would not be lazy, and have no elements.
            if isinstance(params, TensorDictParams) and lazy_tensors(params):
                memo[id(params)] = _map_params(params, path, copied)
        return copy.deepcopy(module, memo)
    except Exception as error:
        sizes = "the input sizes to its constructor, or pass "
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: "
            f"{error}). Pass {sizes if lazy_tensors(module) else ''}policy_factory "
            "instead of policy: it builds the module in the process that acts."
        ) from error


def _allocate(module: nn.Module) -> dict[str, Tensor]:
    """Replace each meta tensor by memory filled with a marker."""
    memo: dict[int, Tensor] = {}
    empty: dict[str, Tensor] = {}

    def allocate(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        new = _replace(tensor, memo, "cpu")
        with torch.no_grad():
            new.fill_(_marker(new.dtype))
        empty[path] = new
        return new

    _map_tensors(module, allocate)
    return empty


def _marker(dtype: torch.dtype) -> Any:
    """Return a value that initialisers do not write, if the dtype has one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _initialize(module: nn.Module, seed: int | None) -> dict[str, Tensor]:
    """Replace meta tensors by initialised ones on the CPU; return these by path."""
    empty = _allocate(module)
    if not empty:
        return empty
    versions = {path: tensor._version for path, tensor in empty.items()}
    filled = {
        path: (tensor, tensor.detach().clone())
        for path, tensor in _tensors(module).items()
        if path not in empty
    }
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        _reset(module, "", empty)
    with torch.no_grad():
        for tensor, value in filled.values():
            tensor.copy_(value)
    for path, owner, name, tensor in list(_places(module)):
        if path in filled and tensor is not filled[path][0]:
            setattr(owner, name, filled[path][0])
    unfilled = [
        path
        for path, tensor in _tensors(module).items()
        if path in empty and not _filled(tensor, empty[path], versions[path])
    ]
    if unfilled:
        raise ValueError(
            f"Cannot materialize {unfilled}: they are on the meta device and no "
            "reset_parameters() fills them. Write a reset_parameters() in the modules "
            "that own them, or build the module with its values on the CPU, in a "
            "policy_factory if each worker is to build it."
        )
    return empty


def _reset(module: nn.Module, path: str, empty: dict[str, Tensor]) -> None:
    """Initialise every module that has a new tensor, children before parents."""
    dot = f"{path}." if path else ""
    if not any(name.startswith(dot) for name in empty):
        return
    for name, child in module.named_children():
        _reset(child, dot + name, empty)
    if isinstance(module, TensorDictParams):
        return
    private = isinstance(module, _PRIVATE_RESET)
    method = "_reset_parameters" if private else "reset_parameters"
    reset = getattr(module, method, None)
    # A TensorDictModule passes on the method of the module that it wraps.
    if not callable(reset) or getattr(reset, "__self__", module) is not module:
        return
    try:
        reset()
    except Exception as error:
        raise ValueError(
            f"{method}() of {path or 'the module'} ({type(module).__name__}) fails: "
            f"{type(error).__name__}: {error}. It is called without arguments to "
            "initialise a module on the meta device."
        ) from error


def _filled(tensor: Tensor, empty: Tensor, version: int) -> bool:
    if tensor.is_meta:
        return False
    if tensor is empty and tensor.numel() == 0:
        return True
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return not bool(tensor.isnan().any())
    # Writing through ``.data`` does not change the version.
    written = tensor is not empty or tensor._version != version
    return written or not bool((tensor == _marker(tensor.dtype)).any())


def _remember_replaced(module: nn.Module) -> None:
    """Make optimizers that step these parameters raise an error from now on."""
    global _guard_installed
    for parameter in module.parameters():
        if parameter.is_meta or is_lazy(parameter):
            _replaced[parameter] = True
    if not _guard_installed:
        register_optimizer_step_pre_hook(_refuse_replaced)
        _guard_installed = True


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs  # Torch passes the arguments of the step to every hook.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            empty = parameter.is_meta or is_lazy(parameter)
            if empty and parameter in _replaced:
                raise RuntimeError(
                    f"This {type(optimizer).__name__} holds parameters without values: "
                    "it was created from a module on the meta device (or a lazy one) "
                    "before that was materialized, and its steps change nothing. "
                    "Create it from the materialized module: from "
                    "collector.policy.parameters(), or from what materialize() "
                    "returned."
                )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of ``module`` by path; a shared one has several."""
    return {path: tensor for path, _, _, tensor in _places(module)}


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the path of every tensor, its owner, its name there, and the tensor."""
    templates = _template_paths(module)
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        named = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        ]
        if not isinstance(owner, TensorDictParams):
            named += [
                (name, value)
                for name, value in vars(owner).items()
                if isinstance(value, Tensor) and dot + name not in templates
            ]
        for name, tensor in named:
            yield dot + name, owner, name, tensor


def _map_tensors(module: nn.Module, fn: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every tensor of ``module`` by ``fn(path, tensor)``."""
    for path, owner, name, old in list(_places(module)):
        if not isinstance(owner, TensorDictParams):
            new = fn(path, old)
            if new is not old:
                # Module.__setattr__ keeps parameters and buffers apart, and updates an
                # RNN's list of flat weights.
                setattr(owner, name, new)
    for prefix, owner in list(module.named_modules()):
        for name, params in list(owner.named_children()):
            if isinstance(params, TensorDictParams):
                path = f"{prefix}.{name}" if prefix else name
                setattr(owner, name, _map_params(params, path, fn))


def _replace(
    tensor: Tensor, memo: dict[int, Tensor], device: str, *, zero: bool = False
) -> Tensor:
    """Return an uninitialised tensor like ``tensor`` on ``device``.

    The same tensor gets the same replacement, so shared tensors stay shared. A tensor
    that is on ``device`` already is returned unchanged.
    """
    if tensor.device.type == device:
        return tensor
    if id(tensor) not in memo:
        # A lazy one has no memory until its shape is known; this only sets its device.
        new = _new_lazy if is_lazy(tensor) else _empty_like
        memo[id(tensor)] = replacement = new(tensor, device)
        if zero and not is_lazy(tensor):
            replacement.data.zero_()
    return memo[id(tensor)]


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
            keys = [".".join(key_path(k)) for k in params.keys(True, True)]
            dot = f"{prefix}." if prefix else ""
            paths.update(f"{dot}{c}.{key}" for c in children for key in keys)
    return paths


def _map_params(
    params: TensorDictParams, path: str, fn: Callable[[str, Tensor], Tensor]
) -> TensorDictParams:
    changed = TensorDict({}, batch_size=params.batch_size)
    for key, value in params.items(True, True):
        changed[key] = fn(".".join((path, *key_path(key))), value)
    return TensorDictParams(changed, no_convert=True)


def _new_lazy(tensor: Tensor, device: str) -> Tensor:
    """Return another lazy tensor like ``tensor``."""
    kwargs: dict[str, Any] = {"device": device, "dtype": tensor.dtype}
    if isinstance(tensor, nn.Parameter):
        kwargs["requires_grad"] = tensor.requires_grad
    lazy: Tensor = type(tensor)(**kwargs)
    vars(lazy).update(vars(tensor))  # Those of stacked networks have a batch size.
    return lazy


def _empty_like(tensor: Tensor, device: str) -> Tensor:
    empty = torch.empty_like(tensor.detach().to("meta"), device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
