"""Proves from a function's code that it computes from its arguments alone.

Every name in the code is resolved. The function may use tensors, plain values,
operations of torch, ``math``, a few builtins, and functions of which the same is true.
It may assign to its own variables only. Values from outside belong to the state of the
policy (``outer_values``), so a changed one leads to a new recording. The effects of
operations are seen when they are recorded. Whatever is unknown counts as impure.
"""

import builtins
import dis
import math
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_OPERATIONS = (
    torch._C._VariableFunctions,  # noqa: SLF001 - functions such as torch.cat
    torch.functional,
    torch.nn.functional,
    torch.special,
    torch.linalg,
)
_VALUES = (
    *(bool, int, float, complex, str, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.Tensor),
)
_BUILTINS = {
    getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "len"),
        *("list", "max", "min", "pow", "range", "reversed", "round", "slice", "sum"),
        *("tuple", "zip"),
    )
}
_ATTRIBUTES = {
    *("append", "bool", "double", "dtype", "device", "float", "half", "int", "long"),
    *("mT", "ndim", "shape", "T", "type"),
}
_EFFECTS = {
    "backward",
    "grad",
    "record_stream",
    "requires_grad_",
    "retain_grad",
    "set_",
}
_LOCAL = ("LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CLOSURE")
_PREFIXES = (
    *("BINARY_", "BUILD_", "CALL", "COMPARE_", "DICT_", "FORMAT_", "JUMP_", "LIST_"),
    *("POP_JUMP_", "POP_TOP", "POP_ITER", "RETURN_", "SET_", "UNARY_", "UNPACK_"),
    *_LOCAL,
)
_OTHERS = {
    *("CACHE", "CONTAINS_OP", "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "DELETE_FAST"),
    *("END_FOR", "EXTENDED_ARG", "FOR_ITER", "GET_ITER", "IS_OP", "KW_NAMES"),
    *("LOAD_ASSERTION_ERROR", "MAKE_CELL", "MAKE_FUNCTION", "MAP_ADD", "NOP"),
    *("NOT_TAKEN", "PRECALL", "PUSH_NULL", "RAISE_VARARGS", "RERAISE", "RESUME"),
    *("STORE_SLICE", "STORE_SUBSCR", "SWAP", "TO_BOOL"),
}
_MEMBERS = ("LOAD_ATTR", "LOAD_METHOD")
_OTHERS |= {"LOAD_DEREF"}  # A variable of this function, or of the one around it.
_LATER = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


def why_not_pure(function: Any) -> str | None:
    """Return what prevents the proof, as the end of a sentence; None if it is pure.

    Args:
        function: a function or lambda, or a ``partial`` of one.
    """
    return _why_not(function, frozenset())


def outer_values(function: Any) -> Iterator[Any]:
    """Yield the values from outside that a pure function and those it calls read."""
    if isinstance(function, (FunctionType, partial)) and why_not_pure(function) is None:
        yield from _outer_values(function, set())


def _why_not(function: Any, inside: frozenset[Any]) -> str | None:
    if isinstance(function, partial):
        given = (*function.args, *function.keywords.values())
        return _why_not_values(given) or _why_not(function.func, inside)
    if _is_operation(function) or function in inside:
        return None
    if not isinstance(function, FunctionType):
        return f"is of type {type(function).__name__}"
    if function.__code__.co_flags & _LATER:
        return "does not return its result at once"
    checked = inside | {function}
    return _why_not_values(_defaults(function)) or _why_not_code(
        function.__code__, _names(function), checked
    )


def _why_not_values(values: Iterable[Any]) -> str | None:
    for value in values:
        if not _is_value(value):
            return f"has an argument of type {type(value).__name__}"
    return None


def _why_not_code(
    code: CodeType, names: dict[str, Any], inside: frozenset[Any]
) -> str | None:
    """Check one code object; ``names`` are those from outside, with their values."""
    own = {*code.co_cellvars, *code.co_varnames}
    rest = iter(_instructions(code))
    for instruction in rest:
        name, kind = str(instruction.argval), instruction.opname
        reason = None
        if kind == "LOAD_GLOBAL" or (kind == "LOAD_DEREF" and name in names):
            reason = _why_not_name(name, names, rest, inside)
        elif kind in _MEMBERS:
            reason = None if _is_tensor_member(name) else f"uses the attribute {name}"
        elif kind == "STORE_DEREF":
            reason = None if name in own else f"assigns to {name}"
        elif kind not in _OTHERS and not kind.startswith(_PREFIXES):
            reason = f"does more than compute ({kind})"
        if reason is not None:
            return reason
    # Comprehensions and inner functions. Variables of this function hide names.
    inner = {key: value for key, value in names.items() if key not in own}
    codes = [each for each in code.co_consts if isinstance(each, CodeType)]
    reasons = (_why_not_code(each, inner, inside) for each in codes)
    return next(filter(None, reasons), None)


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(i for i in dis.get_instructions(code) if i.opname != "PUSH_NULL")


def _why_not_name(
    name: str,
    names: dict[str, Any],
    rest: Iterator[dis.Instruction],
    inside: frozenset[Any],
) -> str | None:
    """Check a name from outside; consume the members of modules that follow."""
    if name not in names:
        return f"uses {name}, which does not exist"
    value = names[name]
    while isinstance(value, ModuleType):
        member = next(rest)
        if member.opname not in _MEMBERS:
            return f"uses the module {name}"
        name = f"{name}.{member.argval}"
        value = getattr(value, str(member.argval), None)
    return None if _is_allowed(value, inside) else f"uses {name}"


def _is_allowed(value: Any, inside: frozenset[Any]) -> bool:
    if _is_value(value) or _is_operation(value):
        return True
    if isinstance(value, type):
        return issubclass(value, Exception) or value in _BUILTINS
    if isinstance(value, (FunctionType, partial)):
        return _why_not(value, inside) is None
    return _is_builtin(value)


def _is_value(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_value, value))
    return type(value) in _VALUES or type(value) is torch.nn.Parameter


def _is_builtin(value: Any) -> bool:
    if not callable(value):
        return False
    name = getattr(value, "__name__", "")
    return value in _BUILTINS or getattr(math, name, None) is value


def _is_operation(value: Any) -> bool:
    name = getattr(value, "__name__", None)
    if not isinstance(name, str) or isinstance(value, (type, ModuleType)):
        return False
    return any(getattr(holder, name, None) is value for holder in _OPERATIONS)


@cache
def _is_tensor_member(name: str) -> bool:
    """Return whether an attribute is one of tensors that only runs operations."""
    if name in _ATTRIBUTES:
        return True
    if name in _EFFECTS or name.startswith("_") or not hasattr(torch.Tensor, name):
        return False
    return hasattr(torch.ops.aten, name)


def _defaults(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _names(function: FunctionType) -> dict[str, Any]:
    """Return the names from outside that a function reads, with their values."""
    found = {}
    outside, built_in = function.__globals__, vars(builtins)
    for name in _global_names(function.__code__):
        if name in outside:
            found[name] = outside[name]
        elif name in built_in:
            found[name] = built_in[name]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
    return found


@lru_cache(maxsize=256)
def _global_names(code: CodeType) -> tuple[str, ...]:
    loads = (i for i in _instructions(code) if i.opname == "LOAD_GLOBAL")
    found = {str(load.argval) for load in loads}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= set(_global_names(constant))
    return tuple(sorted(found))


def _outer_values(function: Any, seen: set[int]) -> Iterator[Any]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        yield from _outer_values(function.func, seen)
    elif isinstance(function, FunctionType):
        yield function.__code__
        for value in (*_defaults(function), *_names(function).values()):
            yield value
            yield from _outer_values(value, seen)
