"""Declares options. Each option is declared in exactly one place.

An option is a field of a dataclass that derives from ``Options``::

    @dataclass(frozen=True, kw_only=True)
    class MyOptions(Options):
        patience: Annotated[int, Option("batches to wait for", at_least=1)] = 3

The field has the name, type and default of the option. ``Option`` has its help text,
its bounds, and the collectors that do not accept it. These are derived from the
declaration: the keywords of constructors and functions (``method``, ``function``),
also for type checkers and ``help()``; the checks of types and values; and the tables in
the documentation (``scripts/option_tables.py``).
"""

import functools
import inspect
import math
import operator
import reprlib
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

P = ParamSpec("P")
O = TypeVar("O", bound="Options")  # noqa: E741 - of options
S = TypeVar("S")
R = TypeVar("R")

_NO = object()  # Sentinel: the value does not match the type.


@final
@dataclass(frozen=True)
class Option:
    """The metadata of an option, besides its name, type and default.

    Attributes:
        help: meaning of the option in Markdown, for documentation and errors.
        at_least: smallest number allowed. Applies to each number of a sequence.
        at_most: largest number allowed.
        positive: whether numbers must be larger than 0.
        unit: unit of the number, for errors.
        off: further values that mean the default, such as TorchRL's -1.
        hint: last sentence of errors about this option.
        not_in: places that do not accept the option, each with the reason.
        checked: whether its type is checked here. False if other code checks it with
            a better error.
    """

    help: str
    at_least: int | None = None
    at_most: int | None = None
    positive: bool = False
    unit: str = ""
    off: tuple[Any, ...] = ()
    hint: str = ""
    not_in: Mapping[str, str] = field(default_factory=dict)
    checked: bool = True


@final
@dataclass(frozen=True)
class RejectedKeyword:
    """A keyword of TorchRL, or of another function, that is rejected with advice.

    Attributes:
        advice: what to do instead.
        accepts: returns True for values that ask for the behaviour we have anyway.
            These are ignored instead of rejected.
    """

    advice: str
    accepts: Callable[[Any], bool] = lambda _: False


class Declared(NamedTuple):
    """One option of an ``Options`` class."""

    name: str
    kind: Any
    default: Any
    option: Option


class Options:
    """Base class of option dataclasses. Values are checked on construction.

    NumPy integers and floats are converted to Python numbers.

    Attributes:
        rejected_keywords: keywords that are refused with advice.
        renamed_keywords: old names of options, with their present names. They are
            accepted with a DeprecationWarning.
        torchrl_keywords: TorchRL's names of options, with the names here.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for a value out of bounds.
    """

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = {}
    renamed_keywords: ClassVar[Mapping[str, str]] = {}
    torchrl_keywords: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Check every value."""
        for entry in declared(type(self)):
            value = getattr(self, entry.name)
            if not entry.option.checked:
                continue
            converted = _checked(entry, value)
            if converted is not value:
                object.__setattr__(self, entry.name, converted)


def declared(kind: type[Options]) -> tuple[Declared, ...]:
    """Return the options of a class, in the order of their declaration."""
    hashable: Any = kind  # Type checkers consider classes unhashable.
    return _declared(hashable)


@functools.cache
def _declared(kind: Any) -> tuple[Declared, ...]:
    hints = get_type_hints(kind, include_extras=True)
    declarations = []
    for entry in fields(kind):
        hint = hints[entry.name]
        if get_origin(hint) is Annotated:
            option = next(a for a in hint.__metadata__ if isinstance(a, Option))
            declarations.append(
                Declared(entry.name, hint.__origin__, entry.default, option)
            )
    return tuple(declarations)


def values(kind: type[Options], options: Options) -> dict[str, Any]:
    """Return the values that ``options`` has for the options of ``kind``."""
    return {entry.name: getattr(options, entry.name) for entry in declared(kind)}


def changed(kind: type[Options], options: Options) -> dict[str, Any]:
    """Return the values that differ from the defaults."""
    return {
        entry.name: value
        for entry in declared(kind)
        if not _same(value := getattr(options, entry.name), entry.default)
    }


def only(*accepted: Any) -> Callable[[Any], bool]:
    """Return a predicate for ``RejectedKeyword``: is a value one of ``accepted``?"""
    return lambda value: any(_same(value, choice) for choice in accepted)


def refuse(options: Options, caller: str) -> None:
    """Reject options that were changed but are not accepted in ``caller``.

    Raises:
        TypeError: if there is one. The message has the option and the reason.
    """
    kind = type(options)
    changes = changed(kind, options)
    for name, _, _, option in declared(kind):
        if name in changes and caller in option.not_in:
            raise TypeError(f"{caller} takes no {name}: {option.not_in[caller]}.")


def require(name: str, value: Any, kind: Any, option: Option) -> Any:
    """Check a single argument like an option, and return it."""
    return _checked(Declared(name, kind, MISSING, option), value)


def one_for_each(
    name: str, choice: Any, number: int, things: str = "workers"
) -> list[Any]:
    """Return what is chosen for each of some things.

    Args:
        name: of the option.
        choice: one value for all of them, or a list with one for each.
        number: of the things.
        things: what they are.

    Raises:
        ValueError: if a list has another length.
    """
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        return [choice] * number
    if len(choice) != number:
        raise ValueError(
            f"{name} has {len(choice)} entries, expected one for each of {number} "
            f"{things}, or one for all."
        )
    return list(choice)


def nearest(
    name: str,
    known: Iterable[str] | Mapping[str, str],
    most: int = 3,
    cutoff: float = 0.6,
) -> list[str]:
    """Return known names that are spelled like an unknown one, the nearest first.

    Args:
        name: is unknown.
        known: names; of a mapping, the values are returned instead of the names.
        most: how many are returned at most.
        cutoff: least similarity, from 0 to 1.
    """
    names = get_close_matches(name, list(known), most, cutoff)
    return [known[match] for match in names] if isinstance(known, Mapping) else names


def did_you_mean(names: Sequence[str]) -> str:
    """Return a sentence for errors that suggests names; empty if there are none."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


# From declarations to signatures


def method(
    options: Callable[P, O],
) -> Callable[[Callable[[S, O], R]], Callable[Concatenate[S, P], R]]:
    """Let a method, or a constructor, accept the fields of ``options`` as arguments."""

    def decorate(of_options: Callable[[S, O], R]) -> Callable[Concatenate[S, P], R]:
        owner, _, name = of_options.__qualname__.rpartition(".")
        caller = owner if name in ("__init__", "__new__") else f"{name}()"

        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return of_options(self, parse(options, caller, args, kwargs))

        _describe(call, of_options, options)
        return call

    return decorate


def function(
    options: Callable[P, O],
) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Let a function of ``options`` accept its fields as arguments."""

    def decorate(of_options: Callable[[O], R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            parsed = parse(options, f"{of_options.__name__}()", args, kwargs)
            return of_options(parsed)

        _describe(call, of_options, options)
        return call

    return decorate


def parse(
    kind: Any, caller: str, args: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Return the options that are called with these arguments.

    Args:
        kind: class of the options.
        caller: whose arguments they are, for errors.
        args: positional arguments.
        keywords: by name.

    Raises:
        TypeError: if an argument is missing, unknown, or of a wrong type.
        ValueError: if a value is out of bounds.
    """
    arguments = _with_present_names(kind, caller, keywords)
    known = {entry.name: entry for entry in fields(kind)}
    for name, value in list(arguments.items()):
        if name in known:
            continue
        other = kind.rejected_keywords.get(name)
        if other is None:
            raise TypeError(_unknown(caller, name, kind))
        if not other.accepts(value):
            raise TypeError(f"{caller} takes no {name}: {other.advice}.")
        del arguments[name]
    positional = [name for name, entry in known.items() if not entry.kw_only]
    missing = [
        name
        for name, entry in known.items()
        if entry.default is MISSING and name not in arguments
        if name not in positional[: len(args)]
    ]
    if missing:
        texts = {entry.name: f": {entry.option.help}" for entry in declared(kind)}
        raise TypeError(f"{missing[0]} must be given{texts.get(missing[0], '')}.")
    return kind(*args, **arguments)


def _with_present_names(
    kind: Any, caller: str, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords with the present names of renamed options.

    Raises:
        TypeError: if both names of an option are given.
    """
    renamed = dict(keywords)
    for old, new in (kind.renamed_keywords | kind.torchrl_keywords).items():
        if old not in renamed:
            continue
        if new in renamed:
            raise TypeError(f"{caller} got {new} and its other name {old}: pass one.")
        renamed[new] = renamed.pop(old)
        if old in kind.torchrl_keywords:
            continue
        warnings.warn(
            f"{caller}: {old} is now called {new}, as for collectors.",
            DeprecationWarning,
            stacklevel=4,  # Above us are parse() and the decorated function.
        )
    return renamed


def _unknown(caller: str, name: str, kind: Any) -> str:
    hint = did_you_mean(nearest(name, [item.name for item in fields(kind)]))
    return (
        f"{caller} has no argument {name!r}.{hint} "
        'The page "Coming from TorchRL" of the documentation lists TorchRL arguments.'
    )


def _describe(wrapper: Any, wrapped: Any, kind: Any) -> None:
    """Set the name, signature and docstring of a function from its options."""
    functools.update_wrapper(wrapper, wrapped)
    del wrapper.__wrapped__  # Otherwise inspect would show its signature.
    hints = get_type_hints(kind)
    param = inspect.Parameter
    parameters = [
        param(
            entry.name,
            param.KEYWORD_ONLY if entry.kw_only else param.POSITIONAL_OR_KEYWORD,
            default=param.empty if entry.default is MISSING else entry.default,
            annotation=hints[entry.name],
        )
        for entry in fields(kind)
    ]
    nearest = {name: n for n, name in enumerate(_by_class(kind))}
    parameters.sort(
        key=lambda p: (p.kind, p.default is not param.empty, nearest[p.name])
    )
    before = list(inspect.signature(wrapped).parameters.values())[:-1]
    signature = inspect.signature(wrapped).replace(parameters=[*before, *parameters])
    wrapper.__signature__ = signature
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    lines = [inspect.getdoc(wrapped) or "", "", "Arguments:"]
    for entry in sorted(declared(kind), key=lambda entry: nearest[entry.name]):
        text = f"{entry.name}: {entry.option.help}."
        lines.append(
            textwrap.fill(text, 84, initial_indent="    ", subsequent_indent="        ")
        )
    wrapper.__doc__ = "\n".join(lines)


def _by_class(kind: Any) -> list[str]:
    """Return the names of all fields, those of a class before those of its base."""
    names = [entry.name for entry in fields(kind)]
    ranks = {
        name: next(n for n, c in enumerate(kind.__mro__) if name in c.__annotations__)
        for name in names
    }
    return sorted(names, key=lambda name: ranks[name])


# From types to checks


def _checked(entry: Declared, value: Any) -> Any:
    """Check a value and convert it to the type of its option.

    Raises:
        TypeError: if it has another type.
        ValueError: if it is out of bounds or not one of the choices.
    """
    _, kind, default, option = entry
    if any(_same(value, off) for off in option.off):
        return default
    converted = _fit(value, kind)
    if converted is _NO:
        choices = any(get_origin(part) is Literal for part in _parts(kind))
        error = ValueError if choices else TypeError
        raise error(_expected(entry, value))
    for number in _numbers(converted):
        low, high = option.at_least, option.at_most
        if (
            (option.positive and not number > 0)
            or (low is not None and number < low)
            or (high is not None and number > high)
        ):
            raise ValueError(_expected(_violated(entry, converted, number), value))
    return converted


def _violated(declared_option: Declared, value: Any, number: float) -> Declared:
    """Return the option with only the bounds and the types that an error is about.

    The bound that a number keeps would hide the one that it breaks, and a sequence is
    no answer to a wrong number.
    """
    option = declared_option.option
    if option.at_most is not None and number > option.at_most:
        bounds = replace(option, at_least=None)
    else:
        bounds = replace(option, at_most=None)
    parts = [
        part
        for part in _parts(declared_option.kind)
        if (get_origin(part) is not Sequence or isinstance(value, Sequence))
        and (part not in (int, float) or not isinstance(value, Sequence))
    ]
    kind = functools.reduce(operator.or_, parts)
    return declared_option._replace(kind=kind, option=bounds)


def _same(value: Any, other: Any) -> bool:
    """Whether values are equal and of the same kind: 1 is not True."""
    if value is other:
        return True
    if isinstance(value, Integral) and isinstance(other, Integral):
        return isinstance(value, bool) == isinstance(other, bool) and value == other
    return type(value) is type(other) and bool(value == other)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)


def _fit(value: Any, kind: Any) -> Any:  # noqa: C901, PLR0911 - one case per type
    """Return a value converted to ``kind``, or ``_NO`` if it does not match."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        fitting = (_fit(value, part) for part in get_args(kind))
        return next((converted for converted in fitting if converted is not _NO), _NO)
    if origin is Literal:
        return next((c for c in get_args(kind) if _same(value, c)), _NO)
    if kind in (None, NoneType):
        return None if value is None else _NO
    if kind is bool:
        return bool(value) if isinstance(value, bool | np.bool_) else _NO
    if kind in (int, float):
        return _number(value, kind)
    if origin is Callable or kind is Callable:
        return value if callable(value) else _NO
    if origin is Sequence:
        return _sequence(value, *get_args(kind))
    if origin is Mapping:
        fits = isinstance(value, Mapping) and all(isinstance(k, str) for k in value)
        return value if fits else _NO
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        return kind.__members__.get(value.upper(), _NO)
    open_kind = kind is Any or getattr(kind, "_is_protocol", False)
    if open_kind or not isinstance(kind, type):
        return value  # Any, or a protocol, which is checked on use.
    return value if isinstance(value, kind) else _NO


def _number(value: Any, kind: Any) -> Any:
    expected: Any = Integral if kind is int else Real
    if isinstance(value, bool) or not isinstance(value, expected):
        return _NO
    return kind(value) if kind is int or math.isfinite(value) else _NO


def _sequence(value: Any, kind: Any) -> Any:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return _NO
    converted = [_fit(part, kind) for part in value]
    if any(part is _NO for part in converted):
        return _NO
    same = all(
        part is original for part, original in zip(converted, value, strict=True)
    )
    return value if same else converted


# From types to words


def _expected(entry: Declared, value: Any) -> str:
    hint = f" {entry.option.hint}" if entry.option.hint else ""
    shown = reprlib.repr(value)
    return f"{entry.name} must be {type_words(entry)}, but is {shown}.{hint}"


def type_words(entry: Declared) -> str:
    """Return the values that an option takes, such as "an integer of at least 1"."""
    _, kind, _, option = entry
    parts = _parts(kind)
    words = [_words(part, option) for part in parts if get_origin(part) is not Literal]
    literals = (part for part in parts if get_origin(part) is Literal)
    choices = [choice for part in literals for choice in get_args(part)]
    if choices:
        if NoneType in parts:
            choices.append(None)
            words.remove("None")
        words.insert(0, "one of " + ", ".join(map(repr, choices)))
    return ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _words(  # noqa: PLR0911 - one return per kind of type
    kind: Any, option: Option, *, several: bool = False
) -> str:
    origin = get_origin(kind)
    if origin is Sequence:
        (part,) = get_args(kind)
        words = [_words(p, option, several=True) for p in _parts(part)]
        return f"a sequence of {' or '.join(words)}"
    if origin is Mapping:
        return "mappings" if several else "a mapping with strings as keys"
    if origin is Callable or kind is Callable:
        return "callables" if several else "callable"
    if kind is bool:
        return "True or False"
    if kind in (int, float):
        return _bounded(kind, option, several=several)
    if kind is str:
        return "strings" if several else "a string"
    if kind is NoneType:
        return "None"
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = dict.fromkeys(member.name for member in kind)
        return "one of " + ", ".join(f"{kind.__name__}.{name}" for name in names)
    name = getattr(kind, "__qualname__", str(kind))
    return f"{name}s" if several else f"a {name}"


def _bounded(kind: Any, option: Option, *, several: bool) -> str:
    word = "integer" if kind is int else "number"
    positive = "positive " if option.positive else ""
    article = "" if several else "an " if kind is int and not positive else "a "
    text = f"{article}{positive}{word}" + "s" * several
    text += f" of {option.unit}" if option.unit else ""
    low, high = option.at_least, option.at_most
    if low is not None and high is not None:
        return f"{text} of at least {low} and at most {_largest(high)}"
    if low is not None:
        return f"{text} of at least {low}"
    return text if high is None else f"{text} of at most {_largest(high)}"


def _largest(number: int) -> str:
    """Return a bound in words; a long one as a power of two."""
    bits = number.bit_length()
    long = bits > 40 and number == 2**bits - 1
    return f"2**{bits} - 1" if long else f"{number:_}"
