"""Finds changed settings of a module and applies them to its copies.

Settings are ``training`` and the attributes of a module and its submodules that consist
of data: numbers, strings, small tensors and arrays, containers and objects of these. A
worker's copy starts with the settings of the original. ``SettingsWatch`` finds later
changes in the trainer, and ``apply_settings`` repeats them in the copy.

An attribute that the copy has changed while it acted (a counter, a cache) is state, not
a setting. It is not overwritten.
"""

import copy
import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, final

import cloudpickle
from torch import Tensor, nn

from marl_collect.errors import warn
from marl_collect.weights.fingerprint import Fingerprint, class_attributes, is_users
from marl_collect.weights.skeleton import weight_tensors

_BASE = frozenset(vars(nn.Module())) - {"training"}
_SIMPLE = (bool, int, str, type(None))
_CODE = "forward"  # Stands for what the methods of a module read from outside.

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
@dataclass(frozen=True, eq=False)
class _Setting:
    """A setting as it was when it was looked at.

    Attributes:
        state: equal if the setting is.
        value: the value itself.
        copy: a copy that later changes do not reach; UNKNOWN if it cannot be sent.
    """

    state: Hashable
    value: Any
    copy: Any


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
            (path, name): _setting(value, weights)
            for path, module in self._module.named_modules()
            for name, value in _attributes(module).items()
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
            elif old is not None and not path[1].startswith("_"):
                # A new or private attribute is most often a cache.
                self._warn(path, now.value)
        if not new:
            return
        self._changed |= new
        self._settings = Settings(
            {
                path: (self._start.get(path, _ABSENT), now)
                for path, now in self._changed.items()
            }
        )

    def _warn(self, path: Path, value: Any) -> None:
        if path in self._warned or getattr(value, "grad_fn", None) is not None:
            return
        self._warned.add(path)
        if path[1] == _CODE:
            what = (
                f"What the code of {path[0] or type(self._module).__name__!r} reads "
                "from outside has changed, but it"
            )
        else:
            what = (
                f"The policy's attribute {'.'.join(filter(None, path))!r} has changed, "
                f"but a {type(value).__name__}"
            )
        warn(
            f"{what} cannot be sent to the workers with an update: they keep the value "
            "that they were started with. Build a new collector if the policy's "
            "actions depend on it."
        )


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
        owner = modules.get(path[0])
        if owner is None:
            continue
        name = path[1]
        now = _attributes(owner).get(name, _ABSENT)
        known = applied.get(path, start)
        if known is not Special.UNKNOWN and not same(now, known):
            continue
        applied[path] = value
        if value is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
        elif isinstance(value, Tensor):
            # Cloned, so in-place changes by the copy do not reach ``settings``.
            device = now.device if isinstance(now, Tensor) else value.device
            setattr(owner, name, value.clone().to(device))
        else:
            setattr(owner, name, copy.deepcopy(value))


def structure(module: nn.Module) -> dict[str, str]:
    """Return the class name of every submodule, by path."""
    return {
        path: type(submodule).__name__ for path, submodule in module.named_modules()
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal and of the same type."""
    return Fingerprint(one, values=True) == Fingerprint(other, values=True)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what may be a setting, by name: also from the module's own classes.

    A module reads an attribute of its class like one of its own, so a copy can get it
    as one of its own.
    """
    settings: dict[str, Any] = {}
    code: list[Any] = []
    for kind in filter(is_users, reversed(type(module).__mro__)):
        for name, value in class_attributes(kind):
            if callable(value):
                code.append(value)
            else:
                settings[name] = value
    settings[_CODE] = code
    entries = vars(module)
    settings |= {name: value for name, value in entries.items() if name not in _BASE}
    # A module of torch.jit stores it elsewhere.
    return settings if "training" in entries else {"training": module.training}


def _setting(value: Any, weights: set[int]) -> _Setting:
    if type(value) in _SIMPLE:  # Nearly all are, and a Fingerprint takes longer.
        return _Setting((type(value), value), value, value)
    state = Fingerprint(value, values=True, weights=weights)
    return _Setting(state, value, _copy(value, state))


def _copy(value: Any, state: Fingerprint) -> Any:
    if not state.is_data:
        return Special.UNKNOWN
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if not state.has_objects:
        return copy.deepcopy(value)
    try:
        return cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 - pickling a user's object can raise anything
        return Special.UNKNOWN
