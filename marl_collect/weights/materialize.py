"""Give weights to a module that has none yet: one on the meta device, or a lazy one.

A policy built under ``torch.device("meta")`` costs no memory and travels to a worker as
a few hundred bytes. ``infer_lazy`` finds the sizes that a lazy module still lacks,
``materialize`` allocates every tensor and initialises it. Both return a copy and
leave the module they are given as it is.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from marl_collect.weights.module_tensors import is_meta, map_tensors, replace, slots

# Layers of torch.nn whose initialiser is private.
_PRIVATE_RESET = (nn.MultiheadAttention, nn.Transformer)

_replaced = WeakTensorKeyDictionary()
_guard_installed = False


def meta_tensors(module: nn.Module) -> list[str]:
    """Name every tensor of ``module`` that has no memory yet.

    Parameters, buffers (non-persistent ones too) and tensors that are plain attributes.
    """
    return [slot.path for slot in slots(module) if is_meta(slot.get())]


def lazy_tensors(module: nn.Module) -> list[str]:
    """Name every parameter and buffer of ``module`` whose shape is not known yet."""
    return [slot.path for slot in slots(module) if is_lazy(slot.get())]


def materialize(
    module: nn.Module,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> nn.Module:
    """Copy ``module`` with its meta tensors allocated and initialised.

    Initialisation is what each layer's own ``reset_parameters`` does, children before
    parents, as when the module is built. It happens on the CPU, so that a seed means
    the same weights on every device. A tensor that already had values keeps them, a
    tensor that several layers share stays shared.

    Args:
        module: any module; its lazy parameters must have been inferred, see
            ``infer_lazy``. It is not changed.
        device: of the copy.
        seed: makes the weights reproducible and leaves torch's global generator alone;
            ``None`` draws from that generator.

    Returns:
        A copy that shares no memory with ``module``.

    Raises:
        ValueError: if a parameter is lazy, or if a meta tensor is filled by no
            ``reset_parameters`` (its value would be uninitialised memory).
    """
    lazy = lazy_tensors(module)
    if lazy:
        raise ValueError(
            f"Cannot materialize a lazy module: the shapes of {lazy} are not known. "
            "Run infer_lazy(module, fake_tensordict) first, or give the input sizes "
            "to the constructor."
        )
    result, new = _initialized_copy(module, seed)
    if new:
        _remember_replaced(module)
    return result.to(device)


def has_values(module: nn.Module) -> bool:
    """Whether any parameter of ``module`` has values, so that it may be trained."""
    return any(
        isinstance(tensor, nn.Parameter) and not is_meta(tensor) and not is_lazy(tensor)
        for tensor in (slot.get() for slot in slots(module))
    )


def fill_in_place(module: nn.Module, seed: int | None = None) -> None:
    """Allocate and initialise the meta tensors of ``module`` itself.

    All others, and the identity of every parameter where torch allows it, stay as they
    are. Meta tensors come to the device of the parameters that have values.

    Raises:
        ValueError: if nothing initialises a meta tensor, or if it is one of several
            in a TensorDictParams, which cannot be filled one by one. Then ``module``
            is as it was.
    """
    empty = [slot for slot in slots(module) if is_meta(slot.get())]
    within = [slot.path for slot in empty if isinstance(slot.module, TensorDictParams)]
    if within:
        raise ValueError(
            f"Some parameters of the policy have values, but {within} are on the meta "
            "device. Give all of them values before you pass the policy "
            "(marl_collect.materialize returns a copy that has them), or none."
        )
    filled, _ = _initialized_copy(module, seed)
    values = {slot.path: slot.get() for slot in slots(filled)}
    device = next(
        (p.device for p in module.parameters() if not is_meta(p)), torch.device("cpu")
    )
    done: dict[int, Tensor] = {}
    for slot in empty:
        old = slot.get()
        if not is_meta(old):
            continue  # A tied one, which is filled already.
        new = done.get(id(old))
        if new is None:
            new = _on(values[slot.path], device)
            done[id(old)] = new
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # Somebody holds weak references to it, as an RNN does.
            slot.set(new)


def infer_lazy(module: nn.Module, fake_tensordict: TensorDictBase) -> nn.Module:
    """Copy ``module`` with the shapes of its lazy parameters known.

    The copy runs once on ``fake_tensordict``, on the meta device, and on the CPU if it
    cannot run there. Parameters that were lazy end on the meta device: they have a
    shape and no values, so that ``materialize`` initialises them with its seed. All
    others keep their device and values, buffers that a forward pass updates too.

    Args:
        module: takes a TensorDict, as policies do. It is not changed.
        fake_tensordict: one input, of any batch size; the values do not matter as long
            as they are legal.

    Raises:
        ValueError: if the module cannot run on ``fake_tensordict``, or if parameters
            are lazy even after it has.
    """
    unknown = set(lazy_tensors(module))
    if not unknown:
        return _deepcopy(module)
    ran = _run_once(module, fake_tensordict)
    left = lazy_tensors(ran)
    if left:
        raise ValueError(
            f"A forward pass did not reach the lazy parameters {left}. "
            "Give their input sizes to the constructor."
        )
    known = {slot.path: slot.get() for slot in slots(_deepcopy(module))}
    memo: dict[int, Tensor] = {}

    def original(path: str, tensor: Tensor) -> Tensor:
        if path in unknown:
            return replace(tensor, memo, "meta")
        return known.get(path, tensor)

    map_tensors(ran, original)
    _remember_replaced(module)
    return ran


def _run_once(module: nn.Module, fake_tensordict: TensorDictBase) -> nn.Module:
    """Run a copy of ``module`` where no values are needed, or else where they are."""
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
    raise ValueError(
        "Cannot infer the shapes of the lazy parameters "
        f"{lazy_tensors(module)}: the module fails on a fake input with the entries "
        f"{_describe(fake_tensordict)} ({type(errors[1]).__name__}: {errors[1]}; on "
        f"the meta device: {type(errors[0]).__name__}: {errors[0]}). Give the input "
        "sizes to the constructor, or give a policy_factory."
    ) from errors[1]


def _zeroed_copy(module: nn.Module, device: str) -> nn.Module:
    """Copy ``module`` to ``device``; what had no values gets zeros."""
    result = _deepcopy(module)
    memo: dict[int, Tensor] = {}
    map_tensors(result, lambda _, t: replace(t, memo, device, zero=True))
    return result


def _describe(td: TensorDictBase) -> dict[Any, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in td.items(True, True)}


def _deepcopy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: "
            f"{error}). Give a policy_factory, which builds it where it is needed."
        ) from error


def _allocate(module: nn.Module) -> dict[str, Tensor]:
    """Replace each meta tensor by memory that is marked as not yet written."""
    memo: dict[int, Tensor] = {}
    empty: dict[str, Tensor] = {}

    def allocate(path: str, tensor: Tensor) -> Tensor:
        if not is_meta(tensor):
            return tensor
        new = replace(tensor, memo, "cpu")
        with torch.no_grad():
            new.fill_(_marker(new.dtype))
        empty[path] = new
        return new

    map_tensors(module, allocate)
    return empty


def _marker(dtype: torch.dtype) -> Any:
    """A value that no initialiser writes, as far as the dtype has one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _initialize(module: nn.Module, empty: dict[str, Tensor], seed: int | None) -> None:
    versions = {path: tensor._version for path, tensor in empty.items()}
    kept = {
        slot: (slot.get(), slot.get().detach().clone())
        for slot in slots(module)
        if slot.path not in empty
    }
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        _reset(module, "", empty)
    with torch.no_grad():
        for slot, (tensor, value) in kept.items():
            tensor.copy_(value)
            if slot.get() is not tensor:
                slot.set(tensor)
    unfilled = [
        slot.path
        for slot in slots(module)
        if slot.path in empty
        and not _filled(slot.get(), empty[slot.path], versions[slot.path])
    ]
    if unfilled:
        raise ValueError(
            f"Cannot materialize {unfilled}: they are on the meta device and no "
            "reset_parameters() fills them. Write a reset_parameters() in the modules "
            "that own them, or give a policy_factory, which builds the module with its "
            "values where it is needed."
        )


def _reset(module: nn.Module, path: str, empty: dict[str, Tensor]) -> None:
    """Run the initialisers of every module with a new tensor, in building order."""
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
    if not callable(reset):
        return
    try:
        reset()
    except Exception as error:
        raise ValueError(
            f"{method}() of {path or 'the module'} ({type(module).__name__}) fails: "
            f"{type(error).__name__}: {error}. It is called without arguments to "
            "initialise a module from the meta device."
        ) from error


def _filled(found: Tensor, empty: Tensor, version: int) -> bool:
    if is_meta(found):
        return False
    if found is empty and found.numel() == 0:
        return True
    if found.dtype.is_floating_point or found.dtype.is_complex:
        return not bool(found.isnan().any())
    # Writing through ``.data`` leaves the version as it was.
    written = found is not empty or found._version != version
    return written or not bool((found == _marker(found.dtype)).any())


def _initialized_copy(
    module: nn.Module, seed: int | None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy without meta tensors, and what was allocated in it, by path."""
    result = _deepcopy(module)
    empty = _allocate(result)
    if empty:
        _initialize(result, empty, seed)
    return result, empty


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _remember_replaced(module: nn.Module) -> None:
    """From now on, an optimizer that steps these parameters says what is wrong."""
    global _guard_installed
    for parameter in module.parameters():
        if is_meta(parameter) or is_lazy(parameter):
            _replaced[parameter] = True
    if not _guard_installed:
        register_optimizer_step_pre_hook(_refuse_replaced)
        _guard_installed = True


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs  # What the step was called with; torch passes it to every hook.
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
