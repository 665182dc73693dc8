"""Pickles a policy without its weights.

Every parameter and buffer, including non-persistent ones, is pickled as a number. The
worker replaces the numbers by views of its own weight vector. A tied tensor has one
number and stays tied. No weight is copied, on any device. Tensors that are plain
attributes are sent by value, on the CPU.

Two kinds of modules that pickle cannot handle are supported: parametrised modules
(weight and spectral norm), whose class torch creates for each object, and modules of
torch.jit.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from marl_collect.errors import unpicklable
from marl_collect.processes import pickling
from marl_collect.weights.state import (
    Attribute,
    class_data,
    same_state,
    users_classes,
)
from marl_collect.weights.tensor_parts import is_plain

_KNOWN = "known"
_PLAIN = "plain"


@dataclass(frozen=True)
class Skeleton:
    """A pickled module without weights.

    Attributes:
        module: pickled with cloudpickle; weights are replaced by numbers.
        trainable: ``requires_grad`` of each parameter, None for a buffer.
        of_classes: pickled data of classes that workers import. The process that
            pickles may have changed them.
    """

    module: bytes
    trainable: tuple[bool | None, ...]
    of_classes: Mapping[Attribute, bytes]


def weight_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of ``module`` once, by its first name.

    Sparse and quantized ones are left out: they are settings.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor for name, tensor in named if is_plain(tensor)}


def split_module(module: nn.Module) -> Skeleton:
    """Pickle ``module`` without its weights.

    Raises:
        TypeError: if it cannot be pickled. The message suggests ``policy_factory``.
    """
    tensors = list(weight_tensors(module).values())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def dumps(part: object) -> bytes:
        stream = io.BytesIO()
        ModulePickler(stream, numbers).dump(part)
        return stream.getvalue()

    try:
        content = dumps(module)
    except Exception as error:
        raise TypeError(
            f"The policy {type(module).__name__} cannot be sent to the workers "
            f"({type(error).__name__}: {error}, in {unpicklable(module, dumps)}). Pass "
            "policy_factory, a callable that builds the policy in each worker, instead "
            "of policy."
        ) from error
    trainable = tuple(
        tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        for tensor in tensors
    )
    return Skeleton(content, trainable, _of_classes(module))


def assemble_module(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> nn.Module:
    """Unpickle the module with ``tensors`` as its weights, ordered by number."""
    weights = [
        tensor if trainable is None else nn.Parameter(tensor, requires_grad=trainable)
        for tensor, trainable in zip(tensors, skeleton.trainable, strict=True)
    ]
    module: nn.Module = ModuleUnpickler(io.BytesIO(skeleton.module), weights).load()
    for unpickled, weight in zip(weight_tensors(module).values(), weights, strict=True):
        if unpickled is not weight:  # Modules of torch.jit are sent with their tensors.
            unpickled.data = weight.detach()
    modules = dict(module.named_modules())
    for attribute, content in skeleton.of_classes.items():
        assert attribute.base is not None
        kind = type(modules[attribute.module]).__mro__[attribute.base]
        value = cloudpickle.loads(content)
        if not same_state(vars(kind).get(attribute.name), value):
            setattr(kind, attribute.name, value)
    return module


def _of_classes(module: nn.Module) -> dict[Attribute, bytes]:
    """Return the data in classes that are sent by name, as far as it can be pickled."""
    contents: dict[Attribute, bytes] = {}
    for kind, (path, base) in users_classes(module).items():
        for name, value in class_data(kind).items() if _is_sent_by_name(kind) else ():
            with suppress(Exception):  # Pickling a user's object can raise anything.
                contents[Attribute(path, name, base)] = pickling.dumps(value)
    return contents


def _is_sent_by_name(kind: type) -> bool:
    """Return whether a worker imports a class, and does not get what is in it."""
    by_name: bool = cloudpickle.cloudpickle._should_pickle_by_reference(kind)  # noqa: SLF001
    return by_name


def _reduce_format(value: torch.memory_format) -> tuple[Any, ...]:
    return getattr, (torch, str(value).removeprefix("torch."))


# Pickle looks for such an object in all modules, and may find it in ``__mp_main__``,
# the user's script, which workers do not have.
cloudpickle.Pickler.dispatch_table[torch.memory_format] = _reduce_format


class ModulePickler(pickling.Pickler):
    """Pickles modules without their weights."""

    def __init__(
        self, stream: io.BytesIO, keys: Mapping[int, Any], *, activations: bool = True
    ) -> None:
        """Write to ``stream``.

        Args:
            stream: gets the bytes.
            keys: of what is not pickled, such as weights, by its id.
            activations: whether tensors with a history may be pickled.
        """
        super().__init__(stream)
        self._keys = keys
        self._activations = activations

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for an object, None if it is pickled.

        Raises:
            PicklingError: for a tensor with a history, which training stored there, if
                there may be none.
        """
        key = self._keys.get(id(obj))
        if key is not None:
            return (_KNOWN, key)
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.device.type not in ("cpu", "meta"):
            return (_PLAIN, obj.detach().cpu().numpy())
        if obj.grad_fn is not None and not self._activations:
            raise pickle.PicklingError("A tensor has a history.")
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled."""
        if isinstance(obj, torch.jit.ScriptModule):
            stream = io.BytesIO()
            torch.jit.save(obj, stream)
            return _load_script, (stream.getvalue(),)
        if isinstance(obj, nn.Module) and _is_parametrized(obj):
            # Torch created this class for the object, derived from its original one.
            base = type(obj).__bases__[0]
            names = tuple(obj.parametrizations)  # type: ignore[arg-type]
            state = (dict(vars(obj)), names)
            return _new_module, (base,), state, None, None, _parametrize
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            _keep_repeated(obj, reduced[2][0])
        return reduced


def _keep_repeated(kind: type, state: dict[str, Any]) -> None:
    """Add constants that a class repeats from its base to its pickled attributes.

    cloudpickle leaves out what equals the inherited value, such as a second
    ``pure_forward = True``. Yet a class that overrides ``forward`` has to declare it
    again.
    """
    for name, value in vars(kind).items():
        if isinstance(value, bool | int | float | str) and not name.startswith("__"):
            state.setdefault(name, value)


def _is_parametrized(module: nn.Module) -> bool:
    # torch's function alone is not enough: it is true for modules that copy the
    # attribute.
    return parametrize.is_parametrized(module) and type(module).__name__.startswith(
        "Parametrized"
    )


def _new_module(base: type[nn.Module]) -> nn.Module:
    return base.__new__(base)


def _parametrize(
    module: nn.Module, state: tuple[dict[str, Any], Sequence[str]]
) -> None:
    vars(module).update(state[0])
    parametrize._inject_new_class(module)  # noqa: SLF001 - it has no public way
    for name in state[1]:
        parametrize._inject_property(module, name)  # noqa: SLF001 - as above


def _load_script(code: bytes) -> Any:
    return torch.jit.load(io.BytesIO(code), map_location="cpu")


class ModuleUnpickler(pickle.Unpickler):
    """Reads what a ``ModulePickler`` of this package's processes has written."""

    def __init__(self, stream: io.BytesIO, known: Any) -> None:
        """Read from ``stream``.

        Args:
            stream: has the bytes.
            known: what was not pickled, by its key.
        """
        super().__init__(stream)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        """Return what was not pickled."""
        kind, value = pid
        return self._known[value] if kind == _KNOWN else torch.from_numpy(value)
