"""Tells whether anything but weights and inputs changes what a policy computes.

A policy's result depends on the attributes of its modules and of the objects in them,
on containers at any depth, and on what its code reads from outside: globals, constants
of imported modules, variables of enclosing functions, attributes of classes. A
``Fingerprint`` is equal for equal state. Code and classes of installed packages are
taken as constant; the values in them that a policy reads are not.

Updates of weights, fused programs and copies for single agents all use it.
"""

import array
import builtins
import dis
import enum
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache, partial
from itertools import chain
from operator import is_, itemgetter, length_hint
from pathlib import Path
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from marl_collect.weights.tensor_parts import strided_parts

LARGE = 1 << 20
"""In bytes. Of larger tensors and arrays, checksums are compared."""

_MOST_VALUES = 100_000  # Comparing more would take longer than it could save.
_DEEPEST = 60  # Levels of nesting. Python's own limit of recursion is near 1000.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_TEXTS: dict[type, Callable[[Any], str]] = {float: float.hex, slice: str}
"""Texts that are compared: NaN equals NaN, and -0.0 is not 0.0."""
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    np.ufunc,
)
_OPERATORS = ("torch._ops", "torch._jit", "typing")
_CHANGING = {
    *("datetime", "os", "random", "secrets", "socket", "subprocess", "sys"),
    *("threading", "time", "uuid"),
}
"""Modules of the standard library whose results change from call to call."""
_REFLECTION = {"eval", "exec", "globals", "input", "locals", "open", "vars"}
"""Builtins that may read anything."""
_EQUAL = (bool, str, type(None))
"""Types whose values are compared with ``==``, which is faster than one by one."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WEIGHTS = ("_parameters", "_buffers")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""A dtype of numpy for each size of a number."""
_MISSING = object()
_END = object()


class _Reads:
    """Reads the same places again whenever it is iterated."""

    def __init__(self, get: Callable[[Any], Any], places: Iterable[Any]) -> None:
        self._get, self._places = get, tuple(places)

    def __iter__(self) -> Iterator[Any]:
        return map(self._get, self._places)


@final
class Fingerprint:
    """The state of a value besides its weights; equal if the state is.

    Attributes:
        marks: what is compared.
        unseen: where there is a value whose changes cannot be seen, and its type.
        is_data: whether it consists of plain values, small tensors, and containers and
            objects of these, so a copy can be sent to another process.
        has_objects: whether there is an object of a class in it.
        has_further: whether there is a module in it whose tensors are not all weights.
        classes: marks of the classes of objects, by class. A copy that is sent has the
            classes of the process to which it is sent.
    """

    def __init__(self, value: Any, *, values: bool = False, weights: Any = ()) -> None:
        """Walk through ``value``.

        Args:
            value: a module, function, or any other object.
            values: compare tensors by value. Otherwise their addresses are compared,
                because a recording reads the values in every run.
            weights: ids of tensors that are not compared by value.
        """
        self._value, self._by_value, self._weights = value, values, weights
        self._left_out = _OF_TORCH if values else _OF_TORCH.difference(_HOOKS, _WEIGHTS)
        self._views: list[Iterable[Any]] = [(value,)]
        self._entries: list[tuple[Callable[[Any], Any], Any]] = []
        self._equal: list[tuple[Callable[[Any], Any], Any]] = []
        self._sized: list[Any] = []
        self._tensors: list[Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._numbers: dict[Hashable, tuple[int, Any]] = {}
        self._path: list[str] = []
        self._left = _MOST_VALUES
        self.unseen: list[str] = []
        self.is_data = True
        self.has_objects = self.has_further = False
        self.classes: dict[type, Hashable] = {}
        self.marks = self._mark(value)
        self._views.append((_END,))
        self._seen = list(self._look())
        self._equal_seen = [get(entries) for get, entries in self._equal]
        self._sizes = list(map(len, self._sized))
        self._tensor_marks = list(map(self._quick, self._tensors))
        self._array_copies = [array.copy() for array in self._arrays]

    def __eq__(self, other: object) -> bool:
        """Return whether the state is the same."""
        return isinstance(other, Fingerprint) and bool(self.marks == other.marks)

    def __hash__(self) -> int:
        """Return the hash of the state."""
        return hash(self.marks)

    def holds(self) -> bool:
        """Return whether the value still has this state; fast if nothing changed."""
        if self._is_untouched():
            return True
        now = Fingerprint(self._value, values=self._by_value, weights=self._weights)
        if now.marks != self.marks:
            return False
        vars(self).update(vars(now))
        return True

    def _is_untouched(self) -> bool:
        """Return whether all places still have the same objects, themselves the same.

        Nearly always nothing has changed. Comparing identities takes microseconds.
        """
        try:
            return (
                [get(entries) for get, entries in self._equal] == self._equal_seen
                and all(map(is_, self._look(), self._seen))
                and list(map(len, self._sized)) == self._sizes
                and list(map(self._quick, self._tensors)) == self._tensor_marks
                and all(map(np.array_equal, self._arrays, self._array_copies))
            )
        except (RuntimeError, LookupError, AttributeError):  # Something is gone.
            return False

    def _look(self) -> Iterator[Any]:
        """Return what all places hold now."""
        held = [get(entries) for get, entries in self._entries]
        return chain(chain.from_iterable(held), chain.from_iterable(self._views))

    def _quick(self, tensor: Tensor) -> Any:
        return _version(tensor) if self._by_value else _memory(tensor)

    def _mark(self, value: Any) -> Hashable:
        kind: Any = type(value)
        # A proxy claims to have the class of its referent, which may be gone.
        if kind.__module__ == "weakref":
            return self._mark_reference(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return kind, _TEXTS[kind](value) if kind in _TEXTS else value
        self._left -= 1
        if self._left < 0 or len(self._path) > _DEEPEST:
            return self._cannot_see(value, "too many values")
        if isinstance(value, tuple | frozenset):
            return self._mark_object(value)
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)][0]
        self._numbers[id(value)] = len(self._numbers), value  # Keeps the id in use.
        methods = (name for kind, name in _METHODS if isinstance(value, kind))
        mark: Hashable = getattr(self, next(methods, "_mark_object"))(value)
        return mark

    def _mark_all(self, values: Iterable[Any]) -> Hashable:
        held = tuple(values)
        self._views.append(held)
        return tuple(map(self._mark, held))

    def _mark_number(self, value: Any) -> Hashable:
        return type(value), value.tobytes()

    def _mark_method(self, method: types.MethodType) -> Hashable:
        return self._mark_all((method.__func__, method.__self__))

    def _mark_partial(self, value: partial[Any]) -> Hashable:
        return self._mark_all((value.func, value.args, value.keywords, vars(value)))

    def _mark_builtin(self, function: types.BuiltinFunctionType) -> Hashable:
        self.is_data = False
        owner = function.__self__
        if _root(function.__module__) in _CHANGING:
            return self._cannot_see(function)
        if owner is None or isinstance(owner, types.ModuleType | type):
            return function.__name__, id(function)
        return function.__name__, self._mark(owner)

    def _mark_constant(self, value: Any) -> Hashable:
        self.is_data = False
        return "constant", id(value)

    def _mark_reference(self, reference: Any) -> Hashable:
        """Mark a weak reference to a tensor, as recurrent layers of torch have them.

        Other referents may change, and a Fingerprint of them would keep them alive.
        """
        if type(reference) is weakref.ref and isinstance(reference(), Tensor):
            return self._mark_constant(reference)
        return self._cannot_see(reference)

    def _mark_object(self, value: Any) -> Hashable:
        """Mark a container or an object by what it holds."""
        kind: Any = type(value)
        # In some classes it is the descriptor of their objects' attribute.
        if str(kind.__module__).startswith(_OPERATORS):
            return self._mark_constant(value)
        content = self._mark_content(value)
        if kind.__module__ == "builtins":
            return kind, content
        self.has_objects = True
        marks: list[Hashable] = [kind, content]
        if hasattr(value, "__dict__"):
            marks.append(self._mark_entries(vars(value)))
        slots = _slots(kind)
        if slots:
            reads = _Reads(lambda name: getattr(value, name, _MISSING), slots)
            self._views.append(reads)
            for name, inner in zip(slots, reads, strict=True):
                if inner is not _MISSING:
                    marks += [name, self._mark_at(name, inner)]
        is_data = self.is_data
        class_mark = self._mark_class(kind)
        marks.append(class_mark)
        self.classes.setdefault(kind, class_mark)
        self.is_data = is_data  # The class is known where a copy is sent.
        return tuple(marks)

    def _mark_content(self, value: Any) -> Hashable:
        """Mark what is in a container; see that an object has nothing hidden."""
        kind: Any = type(value)
        if isinstance(value, _MAPPINGS):
            self._watch(value)
            items = [(self._mark(k), self._mark_at(k, v)) for k, v in value.items()]
            return tuple(items)
        if isinstance(value, _SEQUENCES):
            self._watch(value)
            return tuple([self._mark_at(*item) for item in enumerate(value)])
        if isinstance(value, _SETS):
            self._watch(value)
            return frozenset(map(self._mark, value))
        if hasattr(kind, "__length_hint__"):  # An iterator over a list.
            self._views.append(_Reads(length_hint, [value]))
            return length_hint(value)
        if isinstance(value, bytearray | array.array):
            self._equal.append((crc32, value))
            return len(value), crc32(value)
        return self._cannot_see(value) if _hides_state(kind) else None

    def _watch(self, container: Any) -> None:
        """Have the content of a container compared, if it can change."""
        if isinstance(container, tuple | frozenset):
            return
        self._sized.append(container)
        if container:
            self._views.append(container)
            if isinstance(container, _MAPPINGS):
                self._views.append(container.values())

    def _mark_at(self, name: Any, value: Any) -> Hashable:
        self._path.append(str(name))
        try:
            return self._mark(value)
        finally:
            self._path.pop()

    def _mark_entries(
        self, entries: Mapping[str, Any], left_out: Iterable[str] = ()
    ) -> Hashable:
        """Mark the attributes of an object."""
        self._sized.append(entries)
        names = [name for name in entries if name not in left_out]
        equal = [name for name in names if type(entries[name]) in _EQUAL]
        if equal:
            self._equal.append((itemgetter(*equal), entries))
        others = [name for name in names if name not in equal]
        if len(others) > 1:
            self._entries.append((itemgetter(*others), entries))
        elif others:  # For one name, itemgetter returns no tuple.
            self._views.append(_Reads(entries.__getitem__, others))
        return tuple([(name, self._mark_at(name, entries[name])) for name in names])

    def _mark_module(self, module: nn.Module) -> Hashable:
        self.is_data = False
        if isinstance(module, TensorDictParams):
            return self._mark_all([vars(module)["_param_td"]])
        if isinstance(module, ScriptModule):
            self._views.append(_Reads(lambda one: one.training, [module]))
            return self._cannot_see(module), module.training
        entries = self._mark_entries(vars(module), self._left_out)
        further = self._mark_further(module) if self._by_value else None
        children = tuple(module._modules.items())
        if not self._by_value:  # Of an update, WeightWalk sees other submodules.
            self._watch(module._modules)
        inner = tuple([(name, self._mark_at(name, child)) for name, child in children])
        return type(module), entries, further, inner, self._mark_class(type(module))

    def _mark_further(self, module: nn.Module) -> Hashable:
        """Mark the hooks of a module, and its tensors that are not among the weights.

        Of hooks, only their identities count: those that store activations change what
        they hold in every call.
        """
        marks: list[Hashable] = []
        for name in _HOOKS:
            hooks = vars(module).get(name, {})
            self._watch(hooks)
            marks.append(tuple(map(id, hooks.values())))
        for name in _WEIGHTS:
            tensors = vars(module).get(name, {})
            further = {
                key: tensor
                for key, tensor in tensors.items()
                if tensor is not None and id(tensor) not in self._weights
            }
            if further:  # Of other modules, WeightWalk sees that they are replaced.
                self.has_further = True
                self._watch(tensors)
                marks += [(key, self._mark_at(key, t)) for key, t in further.items()]
        return tuple(marks)

    def _mark_tensordict(self, value: Any) -> Hashable:
        self.is_data = False
        content = getattr(value, "_tensordict", None)
        if not isinstance(content, dict):  # Lazily stacked, for example.
            return self._cannot_see(value)
        return value.batch_size, self._mark_entries(content)

    def _mark_tensor(self, tensor: Tensor) -> Hashable:
        if not self._by_value:
            self._tensors.append(tensor)
            return id(tensor), _memory(tensor)
        if id(tensor) in self._weights:
            self.is_data = False
            return "weight"
        self._tensors.append(tensor)
        parts = () if is_lazy(tensor) or tensor.is_meta else strided_parts(tensor)
        size = sum(part.nbytes for part in parts)
        self.is_data &= bool(parts) and size <= LARGE
        if (
            not parts
            or tensor.grad_fn is not None  # An activation that a forward pass stored.
            or tensor.is_quantized
            or (size > LARGE and tensor.device.type != "cpu")
        ):
            self.is_data = False
            return id(tensor), _version(tensor)
        content = tuple([self._mark_array(_bits(part)) for part in parts])
        return tensor.dtype, tensor.shape, content

    def _mark_array(self, array: np.ndarray[Any, Any]) -> Hashable:
        if array.dtype.hasobject:
            return self._cannot_see(array)
        if array.nbytes <= LARGE:
            self._arrays.append(array)
            return array.dtype.str, array.shape, array.tobytes()
        if not self._by_value:
            return self._cannot_see(array)
        self.is_data = False
        self._equal.append((_checksum, array))
        return array.dtype.str, array.shape, _checksum(array)

    def _mark_class(self, kind: type) -> Hashable:
        """Mark what the code of a class reads, unless it is of a library."""
        self.is_data = False
        marks: list[Hashable] = [kind]
        for base in kind.__mro__:
            if _is_library(base.__module__):
                if _root(base.__module__) in _CHANGING:
                    self._cannot_see(base)
                continue
            if ("class", id(base)) in self._numbers:
                continue
            self._numbers["class", id(base)] = len(self._numbers), base
            self._watch(vars(base))
            for name, value in class_attributes(base):
                marks += [name, self._mark_at(name, value)]
        return tuple(marks)

    def _mark_function(self, function: types.FunctionType) -> Hashable:
        self.is_data = False
        if _is_library(function.__module__):
            if _root(function.__module__) in _CHANGING:
                return self._cannot_see(function)
            return "function", function
        code = function.__code__
        names = _names_read(code)
        parts = ("__code__", "__defaults__", "__kwdefaults__")
        cells = function.__closure__ or ()
        outside = function.__globals__
        self._views += [
            _Reads(partial(getattr, function), parts),
            _Reads(_content, cells),
            _Reads(outside.get, names.outside),
        ]
        marks: list[Hashable] = [code, self._mark_entries(vars(function))]
        marks += map(self._mark, (function.__defaults__, function.__kwdefaults__))
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if name == "__class__":  # For super(); it is that of the module.
                continue
            marks.append(self._mark_named(name, _content(cell), names))
        for name in names.outside:
            if name in outside:
                marks.append(self._mark_named(name, outside[name], names))
            elif name in _REFLECTION:
                marks.append(self._cannot_see(getattr(builtins, name)))
        for name in names.imported:
            if name in sys.modules:
                marks.append(self._mark_named(name, sys.modules[name], names))
        return tuple(marks)

    def _mark_named(self, name: str, value: Any, names: "_Names") -> Hashable:
        """Mark a value from outside a function, or the members of a module."""
        if value is _MISSING:
            return name, None
        if not isinstance(value, types.ModuleType):
            return name, self._mark_at(name, value)
        return name, self._mark_members(value, names, set())

    def _mark_members(
        self, module: types.ModuleType, names: "_Names", done: set[int]
    ) -> Hashable:
        """Mark the members of a module that have a name which a function reads."""
        done.add(id(module))
        if _root(module.__name__) in _CHANGING:
            return self._cannot_see(module)
        if "getattr" in names.outside and not _is_library(module.__name__):
            return self._cannot_see(module)  # The name of the member is not known.
        content = vars(module)
        members = [name for name in names.members if name in content]
        self._views.append(_Reads(content.get, names.members))
        marks: list[Hashable] = []
        for name in members:
            value = content[name]
            if not isinstance(value, types.ModuleType):
                marks.append((name, self._mark_at(name, value)))
            elif id(value) not in done:
                marks.append((name, self._mark_members(value, names, done)))
        return tuple(marks)

    def _cannot_see(self, value: Any, reason: str = "") -> Hashable:
        self.is_data = False
        where = ".".join(self._path)
        kind = getattr(value, "__qualname__", None) or type(value).__name__
        if isinstance(value, types.ModuleType):
            kind = f"the module {value.__name__}"
        self.unseen.append(f"{where or 'the policy'} ({reason or kind})")
        self._numbers.setdefault(id(value), (len(self._numbers), value))
        return "unseen", id(value)


_METHODS: tuple[tuple[Any, str], ...] = (
    (Tensor, "_mark_tensor"),
    (np.generic, "_mark_number"),
    (np.ndarray, "_mark_array"),
    (nn.Module, "_mark_module"),
    (TensorDictBase, "_mark_tensordict"),
    (types.FunctionType, "_mark_function"),
    (type, "_mark_class"),
    (types.MethodType, "_mark_method"),
    (partial, "_mark_partial"),
    (types.BuiltinFunctionType, "_mark_builtin"),
    (_DESCRIPTORS, "_mark_constant"),
)
"""How values that are no plain containers or objects are marked."""


def class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class itself defines, without what Python adds to every class.

    Methods and properties are yielded as functions.
    """
    for name, value in list(vars(kind).items()):
        if name.startswith("__") and name != "__call__":
            continue
        if isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, value.fget
        elif isinstance(value, cached_property):
            yield name, value.func
        elif name != "_abc_impl" and not isinstance(value, _DESCRIPTORS):
            yield name, value


def is_users(kind: type) -> bool:
    """Return whether a class is defined by the user, not by a library."""
    return not _is_library(kind.__module__)


@final
class _Names:
    """Names in a function's code.

    Attributes:
        outside: globals that it reads.
        imported: modules that it imports.
        members: attributes of any object, and texts that may be names of attributes.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.outside: tuple[str, ...] = ()
        self.imported: tuple[str, ...] = ()
        self.members = code.co_names
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.outside += (str(instruction.argval),)
            elif instruction.opname == "IMPORT_NAME":
                self.imported += (str(instruction.argval),)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):  # An inner function.
                inner = _Names(constant)
                self.outside += inner.outside
                self.imported += inner.imported
                self.members += inner.members
            elif isinstance(constant, str) and constant.isidentifier():
                self.members += (constant,)
        for attribute in ("outside", "imported", "members"):
            setattr(self, attribute, tuple(dict.fromkeys(getattr(self, attribute))))


@lru_cache(maxsize=1024)
def _names_read(code: types.CodeType) -> _Names:
    return _Names(code)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet.
        return _MISSING


def _memory(tensor: Tensor) -> Any:
    """Return where a tensor is, and how it is laid out."""
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride()
    except (RuntimeError, ValueError, NotImplementedError):  # Lazy or sparse.
        return None


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a strided tensor's memory as an array; numpy lacks some dtypes."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _checksum(array: np.ndarray[Any, Any]) -> int:
    # It reads a billion bytes per second.
    content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return crc32(content)


def _version(tensor: Tensor) -> Any:
    try:
        return tensor._version, tensor.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):  # Made in inference mode.
        return None


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    names_of_slots: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                owner = base.__name__.lstrip("_")
                names_of_slots.append(f"_{owner}{name}" if private else name)
    return tuple(names_of_slots)


@cache
def _hides_state(kind: Any) -> bool:
    """Return whether instances have memory that is no attribute, as those of C have."""
    pointers = len(_slots(kind)) + (kind.__dictoffset__ > 0)
    pointers += kind.__weakrefoffset__ > 0
    pointer = 8
    return kind.__basicsize__ > object.__basicsize__ + pointer * pointers


@lru_cache(maxsize=4096)
def _is_library(name: Any) -> bool:
    """Return whether a module is installed, or part of this package."""
    root = _root(name)
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


def _root(name: Any) -> str:
    return str(name or "").partition(".")[0]
