"""Finds changed settings of a module and applies them to its copies.

Settings are ``training`` and the plain attributes of a module and its submodules:
numbers, strings, containers of these, small tensors and arrays. A worker's copy starts
with the settings of the original. ``SettingsWatch`` finds later changes in the trainer,
and ``apply_settings`` repeats them in the copy.

An attribute that the copy has changed while it acted (a counter, a cache) is state, not
a setting. It is not overwritten.
"""

import copy
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from marl_collect.errors import warn

_BASE = frozenset(vars(nn.Module())) - {"training"}
_LARGE = 1 << 20  # In bytes. Changes of larger tensors and arrays are not sent.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_VERSION = attrgetter("_version")
_TRAINING = attrgetter("training")

Path = tuple[str, str]
"""Path of a submodule, and the name of its attribute."""


class Special(enum.Enum):
    """Marks attributes that do not exist or whose values cannot be sent."""

    ABSENT = enum.auto()
    UNKNOWN = enum.auto()


_ABSENT = Special.ABSENT


@final
@dataclass(frozen=True, eq=False)
class Settings:
    """Every setting that has changed since the copies were made; can be pickled.

    Attributes:
        values: the value at the start and the current value, by path.
    """

    values: Mapping[Path, tuple[Any, Any]]


@final
class SettingsWatch:
    """Finds settings that change after copies of a module were made."""

    def __init__(self, module: nn.Module) -> None:
        """Record the settings with which copies of ``module`` start."""
        self._module = module
        self._known: dict[Path, Any] = {}
        self._start: dict[Path, Any] = {}
        self._changed: dict[Path, Any] = {}
        self._settings: Settings | None = None
        self._warned: set[Path] = set()
        self._look()
        self._start = dict(self._known)

    def changes(self) -> Settings | None:
        """Return all changes since the start, or None.

        The object is the same as in the last call if nothing has changed since.

        Warns:
            UserWarning: once per attribute whose change cannot be sent.
        """
        if self._differs():
            before = self._known
            self._look()
            self._compare(before)
        return self._settings

    def rescan(self) -> None:
        """Read all submodules again, because some may have been replaced."""
        before = self._known
        self._look()
        self._compare(before)

    def _differs(self) -> bool:
        # Nearly always nothing has changed, and an update takes microseconds. All
        # plain values of a module are therefore compared at once, as a tuple.
        try:
            return not (
                [get(own) for get, own in self._reads] == self._seen
                and list(map(len, self._owners)) == self._lengths
                and (not self._others or self._others_as_before())
            )
        except (KeyError, AttributeError):  # An attribute was deleted.
            return True

    def _others_as_before(self) -> bool:
        held = [own[name] for own, name in self._others]
        return (
            all(map(is_, held, self._other_values))
            and list(map(_VERSION, self._tensors)) == self._versions
            and all(map(np.array_equal, self._arrays, self._array_copies))
        )

    def _look(self) -> None:
        self._reads: list[tuple[Callable[[Any], Any], Any]] = []
        self._seen: list[Any] = []
        self._owners: list[dict[str, Any]] = []
        self._known = {}
        # Attributes that are compared by identity, and their values. Versions of
        # tensors and copies of arrays reveal changes in place.
        self._others: list[tuple[dict[str, Any], str]] = []
        self._other_values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._arrays: list[Any] = []
        self._array_copies: list[Any] = []
        for path, module in self._module.named_modules():
            own = vars(module)
            if "training" not in own:  # A module of torch.jit stores it elsewhere.
                self._known[path, "training"] = module.training
                self._reads.append((_TRAINING, module))
                self._seen.append(module.training)
                continue
            names: list[str] = []
            for name, value in own.items():
                if name in _BASE:
                    continue
                kept = self._known[path, name] = self._keep(value)
                if isinstance(kept, _Other | Tensor | np.ndarray):
                    self._others.append((own, name))
                    self._other_values.append(value)
                else:
                    names.append(name)
            get = itemgetter(*names)
            self._reads.append((get, own))
            # Containers are copied, so changes in place are found.
            self._seen.append(get({name: self._known[path, name] for name in names}))
            self._owners.append(own)
        self._lengths = list(map(len, self._owners))
        self._versions = list(map(_VERSION, self._tensors))

    def _keep(self, value: Any) -> Any:
        """Return a snapshot of a value that later in-place changes do not affect."""
        if not _is_setting(value):
            return _Other(value)
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return value.detach().cpu().clone()
        if isinstance(value, np.ndarray):
            self._arrays.append(value)
            self._array_copies.append(value.copy())
            return self._array_copies[-1]
        return copy.deepcopy(value) if isinstance(value, _CONTAINERS) else value

    def _compare(self, before: Mapping[Path, Any]) -> None:
        new: dict[Path, Any] = {}
        for path in {**before, **self._known}:
            old, now = before.get(path, _ABSENT), self._known.get(path, _ABSENT)
            if same(old, now):
                continue
            if isinstance(now, _Other):
                # A new or private attribute is most often a cache.
                if old is not _ABSENT and not path[1].startswith("_"):
                    self._warn(path, now.value)
            else:
                new[path] = now
        if not new:
            return
        self._changed |= new
        start = self._start
        self._settings = Settings(
            {
                path: (_sendable(start.get(path, _ABSENT)), now)
                for path, now in self._changed.items()
            }
        )

    def _warn(self, path: Path, value: Any) -> None:
        if path in self._warned or getattr(value, "grad_fn", None) is not None:
            return
        self._warned.add(path)
        warn(
            f"The policy's attribute {'.'.join(filter(None, path))!r} has changed, but "
            f"a {type(value).__name__} cannot be sent to the workers with an update: "
            "they keep the value that they were started with. Build a new collector "
            "if the policy's actions depend on it."
        )


def apply_settings(
    module: nn.Module, settings: Settings, given: dict[Path, Any]
) -> None:
    """Apply changes of a module's settings to a copy of it.

    Args:
        module: the copy.
        settings: the changes.
        given: the values that earlier calls have set, by path; updated. An attribute
            with a value that is neither the one at the start nor the one set last was
            changed by the copy itself, and is not overwritten.
    """
    modules = dict(module.named_modules())
    for path, (start, value) in settings.values.items():
        owner = modules.get(path[0])
        if owner is None:
            continue
        name = path[1]
        now = vars(owner).get(name, _ABSENT)
        if name == "training":
            now = owner.training
        known = given.get(path, start)
        if known is not Special.UNKNOWN and not same(now, known):
            continue
        given[path] = value
        if value is _ABSENT:
            if now is not _ABSENT:
                delattr(owner, name)
        elif isinstance(value, Tensor):
            # Cloned, so in-place changes by the copy do not reach ``settings``.
            device = now.device if isinstance(now, Tensor) else value.device
            setattr(owner, name, value.clone().to(device))
        else:
            setattr(owner, name, copy.deepcopy(value))


def structure(module: nn.Module) -> dict[str, str]:
    """Return the class name of every submodule, by path."""
    return {path: type(each).__name__ for path, each in module.named_modules()}


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal and of the same type."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, _Other):
        return one.value is other.value
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(torch.equal(one.detach().cpu(), other.detach().cpu()))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@final
@dataclass(frozen=True, eq=False)
class _Other:
    """A value that is compared by identity and never sent."""

    value: Any


def _sendable(value: Any) -> Any:
    return Special.UNKNOWN if isinstance(value, _Other) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(
            _is_plain(part) for item in value.items() for part in item
        )
    if isinstance(value, _CONTAINERS):
        return type(value) in _CONTAINERS and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_setting(value: Any) -> bool:
    """Return whether a value can be sent with an update."""
    if isinstance(value, Tensor):
        # An activation stored by a forward pass has a grad_fn.
        return (
            value.grad_fn is None
            and not value.is_meta
            and value.layout == torch.strided
            and value.numel() * value.element_size() <= _LARGE
        )
    if isinstance(value, np.ndarray):
        return value.nbytes <= _LARGE and not value.dtype.hasobject
    return _is_plain(value)
