"""Finds changed settings of a module and applies them to its copies.

Settings are ``training`` and the attributes of a module, its submodules and their
classes that consist of data: numbers, strings, small tensors and arrays, containers and
objects of these. Sparse buffers are settings, too. A worker's copy starts with the
settings of the original. ``SettingsWatch`` finds later changes in the trainer, and
``apply_settings`` repeats them in the copy. It warns of changes that cannot be sent.

An attribute that the copy has changed while it acted (a counter, a cache) is state, not
a setting. It is not overwritten.
"""

import copy
import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import cloudpickle
from torch import Tensor, nn

from marl_collect.errors import warn
from marl_collect.weights.fingerprint import Fingerprint, class_attributes, is_users
from marl_collect.weights.skeleton import is_sent_by_name, weight_tensors
from marl_collect.weights.tensor_parts import is_plain

_BASE = frozenset(vars(nn.Module())) - {"training"}
_SIMPLE = (bool, int, str, type(None))
_CODE = "forward"  # Stands for what the methods of a module read from outside.
_HOOKS = "register_forward_hook"  # Stands for the hooks of a module.
_WEIGHTS = ("_parameters", "_buffers")


class Path(NamedTuple):
    """Where a setting is.

    Attributes:
        module: path of the submodule.
        name: of the attribute.
        base: None for an attribute of the submodule itself; the index of a class in the
            ``__mro__`` of its class for an attribute of that class.
    """

    module: str
    name: str
    base: int | None = None


class Special(enum.Enum):
    """Marks attributes that do not exist or whose values cannot be sent."""

    ABSENT = enum.auto()
    UNKNOWN = enum.auto()


class Unsent(enum.Enum):
    """Kinds of changes that are not sent: what changed, and what to do."""

    CODE = (
        "What the code of {} reads from outside",
        "keep it in an attribute of the policy",
    )
    HOOKS = ("The hooks of {}", "register them before you build the collector")
    CLASS = (
        "Attributes of classes, whose objects are in {},",
        "set the attributes on the objects",
    )
    MODULE = (
        "A module that is not a submodule, in {},",
        "register it as a submodule, for example in a torch.nn.ModuleList",
    )
    OTHER = (
        "The policy's attributes {}",
        "keep large arrays in buffers (register_buffer)",
    )


_ABSENT = Special.ABSENT
_LISTED = 5  # Names in a warning.
_STAND_INS = {_CODE: Unsent.CODE, _HOOKS: Unsent.HOOKS}


@final
@dataclass(frozen=True, eq=False)
class Settings:
    """Every setting that has changed since the copies were made; can be pickled.

    Attributes:
        values: the value at the start and the current value, by path.
    """

    values: Mapping[Path, tuple[Any, Any]]


@final
@dataclass(frozen=True, eq=False)
class _Setting:
    """A setting as it was when it was looked at.

    Attributes:
        state: equal if the setting is.
        value: the value itself.
        copy: a copy that later changes do not reach; UNKNOWN if it cannot be sent.
        classes: marks of the classes of objects in it, which are not sent.
        has_further: whether there is a module in it whose weights are not published.
    """

    state: Hashable
    value: Any
    copy: Any
    classes: Mapping[type, Hashable]
    has_further: bool = False


@final
class SettingsWatch:
    """Finds settings that change after copies of a module were made."""

    def __init__(self, module: nn.Module) -> None:
        """Record the settings with which copies of ``module`` start."""
        self._module = module
        self._changed: dict[Path, Any] = {}
        self._settings: Settings | None = None
        self._warned: set[Path] = set()
        self._known = self._look()
        self._start = {path: setting.copy for path, setting in self._known.items()}

    def changes(self) -> Settings | None:
        """Return all changes since the start, or None.

        The object is the same as in the last call if nothing has changed since.

        Warns:
            UserWarning: once per attribute whose change cannot be sent.
        """
        if not self._state.holds():
            self.rescan()
        return self._settings

    def rescan(self) -> None:
        """Read all submodules again, because some may have been replaced."""
        before, self._known = self._known, self._look()
        self._compare(before)

    def _look(self) -> dict[Path, _Setting]:
        weights = {id(tensor) for tensor in weight_tensors(self._module).values()}
        self._state = Fingerprint(self._module, values=True, weights=weights)
        return {
            path: _setting(path, value, weights)
            for path, value in _attributes(self._module).items()
        }

    def _compare(self, before: Mapping[Path, _Setting]) -> None:
        new: dict[Path, Any] = {}
        for path in {**before, **self._known}:
            old, now = before.get(path), self._known.get(path)
            if old is not None and now is not None and old.state == now.state:
                continue
            if now is None:
                new[path] = _ABSENT
            elif now.copy is not Special.UNKNOWN:
                new[path] = now.copy
        if new:
            self._changed |= new
            self._settings = Settings(
                {
                    path: (self._start.get(path, _ABSENT), now)
                    for path, now in self._changed.items()
                }
            )
        self._warn_of_others(before)

    def _warn_of_others(self, before: Mapping[Path, _Setting]) -> None:
        """Warn of changes that are not sent: once per kind, and once per attribute."""
        by_kind: dict[Unsent, list[str]] = {}
        # An attribute may hide one of the class.
        hidden = {path[:2]: setting for path, setting in before.items()}
        for path, now in self._known.items():
            old = before.get(path, hidden.get(path[:2]))
            if old is None or old.state == now.state or path in self._warned:
                continue
            kind = _why_unsent(path, old, now)
            if kind is not None:
                self._warned.add(path)
                by_kind.setdefault(kind, []).append(self._named(path, now.value))
        for kind, names in by_kind.items():
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            what, advice = kind.value
            warn(
                f"{what.format(', '.join(names[:_LISTED]) + more)} changed. This "
                "cannot be sent to the workers with an update, so they keep what they "
                f"were started with. If the policy's actions depend on it, {advice}, "
                "or build a new collector."
            )

    def _named(self, path: Path, value: Any) -> str:
        if path.name in (_CODE, _HOOKS):
            return repr(path.module or type(self._module).__name__)
        where = ".".join(filter(None, path[:2]))
        return f"{where!r} ({type(value).__name__})"


def apply_settings(
    module: nn.Module, settings: Settings, applied: dict[Path, Any]
) -> None:
    """Apply changes of a module's settings to a copy of it.

    Args:
        module: the copy.
        settings: the changes.
        applied: the values that earlier calls have set, by path; updated. An attribute
            with a value that is neither the one at the start nor the one set last was
            changed by the copy itself, and is not overwritten.
    """
    modules = dict(module.named_modules())
    for path, (start, value) in settings.values.items():
        if path.module not in modules:
            continue
        owner: Any = modules[path.module]
        settings_now = _own_attributes(owner)
        if path.base is not None:
            owner = type(owner).__mro__[path.base]
            settings_now = dict(class_attributes(owner))
        now = settings_now.get(path.name, _ABSENT)
        known = applied.get(path, start)
        if known is not Special.UNKNOWN and not same(now, known):
            continue
        applied[path] = value
        if value is not _ABSENT:
            setattr(owner, path.name, _private_copy(value, now))
        elif path.name in vars(owner):
            delattr(owner, path.name)


def _private_copy(value: Any, now: Any) -> Any:
    """Return a copy, so that in-place changes of a module do not reach ``Settings``.

    Args:
        value: of the setting.
        now: the value that is replaced.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    device = now.device if isinstance(now, Tensor) else value.device
    cloned = value.clone().to(device)
    if isinstance(now, nn.Parameter):
        return nn.Parameter(cloned, requires_grad=now.requires_grad)
    return cloned


def structure(module: nn.Module) -> dict[str, str]:
    """Return the class name of every submodule, by path."""
    return {
        path: type(submodule).__name__ for path, submodule in module.named_modules()
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal and of the same type."""
    return Fingerprint(one, values=True) == Fingerprint(other, values=True)


def _attributes(module: nn.Module) -> dict[Path, Any]:
    """Return what may be a setting of a module, its submodules and their classes."""
    settings: dict[Path, Any] = {}
    seen: set[type] = set()
    for path, inner in module.named_modules():
        code: list[Any] = []
        for index, kind in enumerate(type(inner).__mro__):
            if not is_users(kind):
                continue
            for name, value in class_attributes(kind):
                if callable(value):
                    code.append(value)
                elif kind not in seen:
                    settings[Path(path, name, index)] = value
            seen.add(kind)
        settings[Path(path, _CODE)] = code
        settings[Path(path, _HOOKS)] = [
            *inner._forward_hooks.values(),
            *inner._forward_pre_hooks.values(),
        ]
        attributes = _own_attributes(inner)
        settings |= {Path(path, name): value for name, value in attributes.items()}
    return settings


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module itself, and tensors that are not weights."""
    entries = vars(module)
    if "training" not in entries:  # A module of torch.jit stores it elsewhere.
        return {"training": module.training}
    settings = {name: value for name, value in entries.items() if name not in _BASE}
    for holder in _WEIGHTS:
        tensors = entries[holder].items()
        settings |= {n: t for n, t in tensors if t is not None and not is_plain(t)}
    return settings


def _setting(path: Path, value: Any, weights: set[int]) -> _Setting:
    if type(value) in _SIMPLE:  # Nearly all are, and a Fingerprint takes longer.
        return _Setting((type(value), value), value, value, {})
    if path.name == _HOOKS:
        return _Setting(tuple(map(id, value)), value, Special.UNKNOWN, {})
    state = Fingerprint(value, values=True, weights=weights)
    copied = Special.UNKNOWN if path.name == _CODE else _copy(value, state)
    return _Setting(state, value, copied, state.classes, state.has_further)


def _why_unsent(path: Path, old: _Setting, now: _Setting) -> Unsent | None:
    """Return why a change of a setting is not sent; None if it is, or is not one."""
    if path.name in _STAND_INS:
        return _STAND_INS[path.name]
    if any(
        old.classes.get(kind, mark) != mark and is_sent_by_name(kind)
        for kind, mark in now.classes.items()
    ):
        return Unsent.CLASS
    if now.copy is not Special.UNKNOWN or getattr(now.value, "grad_fn", None):
        return None
    if now.has_further:
        return Unsent.MODULE
    # A private attribute is most often a cache.
    return None if path.name.startswith("_") else Unsent.OTHER


def _copy(value: Any, state: Fingerprint) -> Any:
    if not state.is_data:
        return Special.UNKNOWN
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    try:
        if not state.has_objects:
            return copy.deepcopy(value)
        return cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 - copying a user's object can raise anything
        return Special.UNKNOWN
