"""The state of a module besides its weights, as bytes that can be compared.

What a module computes depends on the attributes of its submodules and their classes,
and on the objects in them, at any depth. ``ModuleState`` pickles them and compares the
bytes, which nobody unpickles. In the bytes, weights and submodules are numbers, classes
are ids, and small tensors are values. What cannot be pickled is compared by identity.

Not seen: what code reads from outside its module, such as globals, constants of other
modules, other classes' data, and the referents of weak references. The spot check of a
fused policy finds such changes by their results.
"""

import enum
import io
import itertools
import pickle
import random
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from copyreg import dispatch_table
from functools import lru_cache
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple, final
from zlib import crc32

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from marl_collect.weights.tensor_parts import is_plain, strided_parts, version

LARGE = 1 << 20
"""In bytes. Of larger tensors and arrays, checksums are compared (1 ms per MiB)."""

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_WEIGHTS = ("_parameters", "_buffers")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_CONSTANT = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_DESCRIPTORS = (
    *(property, staticmethod, classmethod),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),
)
_HIDDEN = (
    *(weakref.ProxyType, weakref.CallableProxyType),
    *(torch.ScriptObject, types.GeneratorType, types.ModuleType),
)
_DRAWN = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
"""A recording would repeat the numbers that were drawn from these while recording."""
_FOREIGN = ("torch._ops", "torch._jit", "torch._dynamo")
_PARAMETERS = "_param_td"


class Attribute(NamedTuple):
    """Where an attribute is.

    Attributes:
        module: path of the submodule.
        name: of the attribute.
        base: None for an attribute of the submodule itself; the index of a class in the
            ``__mro__`` of its class for an attribute of that class.
    """

    module: str
    name: str
    base: int | None = None

    def __str__(self) -> str:
        """Return the path with dots."""
        return ".".join(filter(None, self[:2]))


def mark(*parts: Any) -> None:
    """Stand for an object in the bytes, which nobody unpickles."""


@final
class ModuleState:
    """The state of a module, or of another callable, when it was last looked at.

    Attributes:
        bytes: of the last look. Two looks at a module give the same bytes if it has
            the same state.
    """

    def __init__(self, module: Any, *, of_recording: bool = False) -> None:
        """Look at ``module``.

        Args:
            module: a module or another callable.
            of_recording: compare where tensors are instead of their values, because a
                recording reads the values in every run.
        """
        self._module, self._of_recording = module, of_recording
        self._lenient = False
        self._unseen: list[str] = []
        self.bytes = self._look()

    def changed(self) -> bool:
        """Return whether the state differs from that of the last look.

        The next call compares with the state that this one found.
        """
        if self._is_untouched():
            return False
        before, self.bytes = self.bytes, self._look()
        return before != self.bytes

    def parts(self) -> dict[Attribute, tuple[bytes, Any]]:
        """Return the bytes and the value of every attribute."""
        self._number()
        return {
            attribute: (self.bytes_of(value), value)
            for attribute, value in attributes(self._module).items()
        }

    def unseen(self) -> str | None:
        """Return where there is a value whose changes cannot be seen, and its type."""
        if not self._unseen:
            return None
        if isinstance(self._module, nn.Module):
            for attribute, value in attributes(self._module).items():
                self.bytes_of(value)
                if self._unseen:
                    return f"{attribute} ({self._unseen[0]})"
        return f"the policy ({self._unseen[0]})"

    def _number(self) -> tuple[list[nn.Module], list[Tensor]]:
        """Number the submodules and the weights; return them."""
        modules: list[nn.Module] = []
        weights: list[Tensor] = []
        if isinstance(self._module, nn.Module):
            modules = [*self._module.modules()]
            tensors = (*self._module.parameters(), *self._module.buffers())
            weights = [tensor for tensor in tensors if is_plain(tensor)]
        numbered = itertools.chain(modules, weights)
        self._numbers = {id(obj): number for number, obj in enumerate(numbered)}
        return modules, weights

    def _look(self) -> bytes:
        """Return the state, and remember what ``_is_untouched`` compares."""
        modules, weights = self._number()
        kinds = users_classes(self._module) if modules else {}
        owned = [own_attributes(module) for module in modules]
        owned += map(class_data, kinds)
        if not modules:
            owned = [{"": self._module}]
        self._weights = weights if self._of_recording else []
        self._locations = list(map(_location, self._weights))
        self._containers: list[Any] = list(map(vars, kinds))
        for module in modules:
            self._containers += _containers(module)
        values = [value for entries in owned for value in entries.values()]
        self._watched: set[int] = set()
        try:
            self._changeable = [value for value in values if not self._is_held(value)]
        except RecursionError:
            self._changeable = values
        filled = filter(None, self._containers)
        self._views: list[Any] = [
            container.values() if isinstance(container, Mapping) else container
            for container in filled
        ]
        self._held = [*itertools.chain.from_iterable(self._views)]
        self._sizes = list(map(len, self._containers))
        self._foreign = list(filter(_is_foreign, modules))
        self._modes = [module.training for module in self._foreign]
        self._changeable_bytes = self.bytes_of(self._changeable)
        types = list(map(id, map(type, modules)))
        return self.bytes_of([types, self._locations, owned])

    def _is_untouched(self) -> bool:
        """Return whether a look would certainly give the same bytes.

        Containers must hold the same objects, and what can change in place is pickled.
        Nearly always nothing has changed, and comparing identities takes microseconds.
        """
        return (
            list(map(len, self._containers)) == self._sizes
            and all(map(is_, itertools.chain.from_iterable(self._views), self._held))
            and list(map(_location, self._weights)) == self._locations
            and [module.training for module in self._foreign] == self._modes
            and (
                not self._changeable
                or self.bytes_of(self._changeable) == self._changeable_bytes
            )
        )

    def _is_held(self, value: Any) -> bool:
        """Return whether comparing identities shows every change of a value.

        Containers of such values are added to those whose entries are compared.
        """
        if type(value) in _CONSTANT or id(value) in self._numbers:
            return True
        if isinstance(value, types.FunctionType):
            defaults = value.__defaults__ or value.__kwdefaults__
            return not (value.__closure__ or defaults or vars(value))
        if isinstance(value, type | enum.Enum | types.BuiltinFunctionType):
            return True
        inner = self._inside(value)
        return inner is not None and all(map(self._is_held, inner))

    def _inside(self, value: Any) -> Iterable[Any] | None:
        """Return what is in a container, and watch it; None for other objects."""
        if id(value) in self._watched:
            return ()
        self._watched.add(id(value))
        if type(value) in (list, tuple):
            self._containers.append(value)
            return iter(value)
        if type(value) is dict:
            self._containers += value.keys(), value
            return (*value, *value.values())
        if isinstance(value, nn.Module) and not _is_foreign(value):
            self._containers += _containers(value)
            inner = (value._modules, value._parameters, value._buffers)
            return (
                *own_attributes(value).values(),
                *(v for i in inner for v in i.values()),
            )
        parameters = getattr(type(value), "__dataclass_params__", None)
        if parameters is not None and parameters.frozen and hasattr(value, "__dict__"):
            return vars(value).values()
        return None

    def bytes_of(self, value: Any) -> bytes:
        """Return the bytes that ``parts`` has of an attribute with this value."""
        if not self._lenient:
            try:
                return self._dump_with(value, lenient=False)
            except Exception:  # noqa: BLE001 - pickling a user's object can raise anything
                self._lenient = True
        try:
            return self._dump_with(value, lenient=True)
        except RecursionError:
            self._unseen = ["nested too deep"]
            return b""

    def _dump_with(self, value: Any, *, lenient: bool) -> bytes:
        stream = io.BytesIO()
        pickler = _Pickler(
            stream, self._numbers, of_recording=self._of_recording, lenient=lenient
        )
        pickler.dump(value)
        self._unseen = pickler.unseen
        return stream.getvalue()


def same_state(one: Any, other: Any) -> bool:
    """Return whether two values, which are no weights, have the same state."""
    return ModuleState([one]).bytes == ModuleState([other]).bytes


def attributes(module: nn.Module) -> dict[Attribute, Any]:
    """Return what the user's classes of a module, itself and its submodules hold."""
    values = {
        Attribute(path, name, base): value
        for kind, (path, base) in users_classes(module).items()
        for name, value in class_data(kind).items()
    }
    for path, inner in module.named_modules():
        entries = own_attributes(inner).items()
        values |= {Attribute(path, name): value for name, value in entries}
    return values


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module itself holds besides weights, submodules and torch's own.

    It has ``training``, forward hooks if there are any, and tensors that are not plain,
    such as sparse buffers. Of a module that torch keeps elsewhere it is ``training``.
    """
    if _is_foreign(module):
        return {"training": module.training}
    entries = vars(module)
    if isinstance(module, TensorDictParams):  # It notes its last operation.
        return {_PARAMETERS: entries[_PARAMETERS]}
    values = {n: value for n, value in entries.items() if n not in _OF_TORCH}
    values |= {name: entries[name] for name in HOOKS if entries.get(name)}
    for holder in _WEIGHTS:
        tensors = entries.get(holder, {}).items()
        values |= {n: t for n, t in tensors if t is not None and not is_plain(t)}
    return values


def _is_foreign(module: nn.Module) -> bool:
    """Return whether torch keeps a module's attributes elsewhere."""
    return isinstance(module, ScriptModule) or type(module).__module__.startswith(
        _FOREIGN
    )


def _containers(module: nn.Module) -> list[Mapping[str, Any]]:
    """Return what holds a module's attributes, submodules, hooks and weights."""
    if _is_foreign(module):
        return []
    entries = vars(module)
    held = [entries[n] for n in ("_modules", *HOOKS, *_WEIGHTS) if n in entries]
    # The module of a TensorDict's parameters notes its last operation.
    return held if isinstance(module, TensorDictParams) else [entries, *held]


def class_data(kind: type) -> dict[str, Any]:
    """Return the data that a class itself defines, without its methods."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") or name == "_abc_impl" or callable(value))
        and not isinstance(value, _DESCRIPTORS)
    }


def users_classes(module: nn.Module) -> dict[type, tuple[str, int]]:
    """Return the user's classes of a module and its submodules, and their bases.

    Returns:
        By class: the path of the first submodule that has it, and its index in the
        ``__mro__`` of that submodule's class.
    """
    classes: dict[type, tuple[str, int]] = {}
    for path, inner in module.named_modules():
        for base, kind in enumerate(type(inner).__mro__):
            if kind not in classes and is_users(kind):
                classes[kind] = path, base
    return classes


def is_users(kind: type) -> bool:
    """Return whether a class is defined by the user, not by a library."""
    return not _is_library(kind.__module__)


@lru_cache(maxsize=4096)
def _is_library(name: Any) -> bool:
    """Return whether a module is installed, or part of this package."""
    root = str(name or "").partition(".")[0]
    if root == "marl_collect" or root in sys.stdlib_module_names:
        return True
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return True
    # `pip install --target` makes a folder of another name. The metadata of an editable
    # installation is not beside its source.
    top = getattr(sys.modules.get(root), "__file__", None)
    if top is None:
        return False
    folder = (
        Path(top).parent.parent if Path(top).stem == "__init__" else Path(top).parent
    )
    return any(folder.glob("*.dist-info"))


def _location(tensor: Tensor) -> Any:
    """Return where a tensor is, and how it is laid out."""
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    except (RuntimeError, ValueError, NotImplementedError):  # Lazy or sparse.
        return id(tensor)


@final
class _Pickler(pickle.Pickler):
    """Writes bytes that are equal if the state is.

    Attributes:
        unseen: types of values that are compared by identity; and of random
            generators of numpy and Python, if the state is that of a recording.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        numbers: Mapping[int, int],
        *,
        of_recording: bool,
        lenient: bool,
    ) -> None:
        super().__init__(stream, protocol=5)
        self._numbers, self._of_recording = numbers, of_recording
        self._lenient = lenient
        self.unseen: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is written."""
        number = self._numbers.get(id(obj))
        if number is not None:
            return mark, (number,)
        # A proxy claims to have the class of its referent, so ask for the type.
        kind: Any = type(obj)
        if issubclass(kind, type):
            return mark, (id(obj),)
        reduce = _reducer_of(kind)
        if reduce is not None:
            return reduce(self, obj)
        if self._lenient:
            return self._reduce_if_possible(obj)
        return NotImplemented

    def _reduce_if_possible(self, obj: Any) -> Any:
        try:
            reduce = dispatch_table.get(type(obj))
            reduced = reduce(obj) if reduce else obj.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 - a user's code can raise anything
            return self.identity(obj)
        # The name of a global. Pickle would look for it.
        return (mark, (id(obj),)) if isinstance(reduced, str) else reduced

    def identity(self, obj: Any) -> Any:
        self.unseen.append(type(obj).__name__)
        return mark, (type(obj).__name__, id(obj))

    def function(self, function: types.FunctionType) -> Any:
        if function is mark:
            return NotImplemented
        cells = [_content(cell) for cell in function.__closure__ or ()]
        defaults = function.__defaults__, function.__kwdefaults__
        # As a state, which is written after the function is known: it may be in a cell.
        return mark, (function.__code__,), [cells, defaults, vars(function)]

    def code(self, code: types.CodeType) -> Any:
        return mark, (code.co_code, code.co_names, code.co_consts)

    def reference(self, reference: "weakref.ref[Any]") -> Any:
        referent = reference()
        # As recurrent layers of torch have them. Other referents may change.
        if isinstance(referent, Tensor):
            return mark, (self._numbers.get(id(referent), id(referent)),)
        return self.identity(reference)

    def inner_module(self, module: nn.Module) -> Any:
        """Write a module in a list, for example, which is no submodule."""
        content: list[Any] = [own_attributes(module)]
        content += [vars(module).get(name) for name in ("_modules", *_WEIGHTS)]
        return mark, (id(type(module)),), content

    def tensordict(self, tensordict: Any) -> Any:
        """Write what it holds, and not what it notes of its last operation."""
        content = getattr(tensordict, "_tensordict", None)
        if not isinstance(content, dict):  # Lazily stacked, for example.
            return NotImplemented
        return mark, (tuple(tensordict.batch_size),), [content]

    def generator(self, generator: torch.Generator) -> Any:
        return mark, (generator.get_state().numpy().tobytes(),)

    def random(self, generator: Any) -> Any:
        if self._of_recording:
            self.unseen.append(type(generator).__name__)
        return NotImplemented

    def array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject or array.nbytes <= LARGE:
            return NotImplemented
        if self._of_recording:  # A checksum in every slot would take too long.
            return self.identity(array)
        content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return mark, (array.dtype.str, array.shape, crc32(content))

    def tensor(self, tensor: Tensor) -> Any:
        if self._of_recording:
            return mark, (id(tensor), _location(tensor))
        parts = () if is_lazy(tensor) or tensor.is_meta else strided_parts(tensor)
        large = sum(part.nbytes for part in parts) > LARGE
        if (
            not parts
            or tensor.grad_fn is not None  # An activation that a forward pass stored.
            or tensor.is_quantized
            or (large and tensor.device.type != "cpu")
        ):
            return mark, (id(tensor), version(tensor))
        contents = map(_memory, parts)
        values = [crc32(content) if large else bytes(content) for content in contents]
        return mark, (tensor.dtype, tuple(tensor.shape), values)


_REDUCERS: tuple[tuple[Any, Any], ...] = (
    (Tensor, _Pickler.tensor),
    (np.ndarray, _Pickler.array),
    (types.FunctionType, _Pickler.function),
    (types.CodeType, _Pickler.code),
    (TensorDictBase, _Pickler.tensordict),
    (nn.Module, _Pickler.inner_module),
    (weakref.ref, _Pickler.reference),
    (torch.Generator, _Pickler.generator),
    ((*_DRAWN, random.Random), _Pickler.random),
    (_HIDDEN, _Pickler.identity),
)
"""How values are written that pickle cannot write, or writes with too much detail."""


@lru_cache(maxsize=4096)
def _reducer_of(kind: Any) -> Any:
    reducers = (reduce for known, reduce in _REDUCERS if issubclass(kind, known))
    foreign = str(kind.__module__).startswith(_FOREIGN)
    return next(reducers, _Pickler.identity if foreign else None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet.
        return None


def _memory(tensor: Tensor) -> memoryview:
    """Return a strided tensor's values as bytes; numpy lacks some dtypes."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)
