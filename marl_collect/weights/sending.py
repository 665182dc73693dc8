"""Sends changes of a module's state to the workers' copies of it.

A worker's copy starts with the state of the original: ``training`` and the attributes
of the module, its submodules and their classes. ``StateWatch`` finds later changes in
the trainer's process, and ``apply_state`` repeats them in the copy. All attributes that
changed since the start travel in one pickle, so what they share stays shared. Weights
and submodules in them are names, and become those of the worker.

An attribute that the copy has changed while it acted (a counter, a cache) belongs to
the worker. It is not overwritten.
"""

import io
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from marl_collect.errors import warn
from marl_collect.weights.skeleton import (
    ModulePickler,
    ModuleUnpickler,
    weight_tensors,
)
from marl_collect.weights.state import HOOKS, Attribute, ModuleState, own_attributes

_LISTED = 5
"""Number of attributes that a warning lists."""


State = bytes
"""What has changed since the copies were made: a pickled mapping from ``Attribute`` to
its value, and the attributes that no longer exist."""


@final
class StateWatch:
    """Finds attributes that change after copies of a module were made."""

    def __init__(self, module: nn.Module) -> None:
        """Look at the state with which copies of ``module`` start."""
        self._module = module
        self._state = ModuleState(module)
        self._parts = _bytes(self._state)
        self._changed: set[Attribute] = set()
        self._warned: set[Attribute] = set()
        self._sent: State | None = None

    def changes(self) -> State | None:
        """Return all changes since the start, or None.

        The object is the same as in the last call if nothing has changed since.

        Warns:
            UserWarning: once per attribute whose change cannot be sent.
        """
        if self._state.changed():
            parts = self._state.parts()
            before, self._parts = self._parts, {p: b for p, (b, _) in parts.items()}
            changed = {
                attribute
                for attribute in before | self._parts
                if before.get(attribute) != self._parts.get(attribute)
            }
            if changed:
                self._changed |= changed
                self._send({path: value for path, (_, value) in parts.items()})
        return self._sent

    def _send(self, values: Mapping[Attribute, Any]) -> None:
        """Pickle the changed attributes, without those that cannot be pickled."""
        names = {id(part): name for name, part in _named_parts(self._module).items()}
        chosen = {a: value for a, value in values.items() if a in self._changed}
        removed = tuple(self._changed.difference(values))
        unfit: dict[Attribute, Any] = {}
        try:
            self._sent = _pickled((chosen, removed), names)
        except Exception:  # noqa: BLE001 - pickling a user's object can raise anything
            fit = {a: v for a, v in chosen.items() if _can_be_pickled(v, names)}
            unfit = {a: v for a, v in chosen.items() if a not in fit}
            self._sent = _pickled((fit, removed), names)
        self._warn_of(unfit)

    def _warn_of(self, values: Mapping[Attribute, Any]) -> None:
        """Warn of attributes that are not sent: once of each, and never of caches."""
        named = sorted(
            f"{str(attribute)!r} ({type(value).__name__})"
            for attribute, value in values.items()
            if attribute not in self._warned
            # A private attribute is most often a cache, as an activation is.
            and not (attribute.name.startswith("_") or getattr(value, "grad_fn", None))
        )
        self._warned |= values.keys()
        if not named:
            return
        others = len(named) - _LISTED
        more = f" and {others} more" if others > 0 else ""
        warn(
            f"The policy's attributes {', '.join(named[:_LISTED])}{more} changed. They "
            "cannot be pickled, so they are not sent with an update, and the workers "
            "keep what they were started with. If the policy's actions depend on them, "
            "keep plain data in them, or build a new collector."
        )


def structure(module: nn.Module) -> dict[str, str]:
    """Return the class name of every submodule, by path."""
    return {path: type(inner).__name__ for path, inner in module.named_modules()}


@final
class StateCopy:
    """A worker's copy of a module, which gets the changes of the original."""

    def __init__(self, module: nn.Module) -> None:
        """Note the state of ``module`` before it acts for the first time."""
        self._module = module
        self._state = ModuleState(module)
        self._applied = _bytes(self._state)

    def apply(self, state: State) -> None:
        """Set the attributes that the copy has not changed itself."""
        modules = dict(self._module.named_modules())
        named = _named_parts(self._module)
        values, removed = ModuleUnpickler(io.BytesIO(state), named).load()
        parts = self._state.parts()
        for attribute in (*values, *removed):
            now = parts.get(attribute)
            known = self._applied.get(attribute)
            if (now and now[0]) != known or attribute.module not in modules:
                continue
            owner: Any = modules[attribute.module]
            if attribute.base is not None:
                owner = type(owner).__mro__[attribute.base]
            if attribute in values:
                value = _fitting(values[attribute], now and now[1])
                setattr(owner, attribute.name, value)
                self._applied[attribute] = self._state.bytes_of(value)
            else:
                _remove(owner, attribute.name)
                self._applied.pop(attribute, None)


def _bytes(state: ModuleState) -> dict[Attribute, bytes]:
    return {attribute: content for attribute, (content, _) in state.parts().items()}


def _fitting(value: Any, now: Any) -> Any:
    """Return a value with the device of the present one; a parameter if that is one."""
    if isinstance(value, Tensor) and isinstance(now, Tensor):
        value = value.to(now.device)
        if isinstance(now, nn.Parameter):
            return nn.Parameter(value, requires_grad=now.requires_grad)
    return value


def _remove(owner: Any, name: str) -> None:
    if name in HOOKS:  # Torch needs the mapping.
        vars(owner)[name].clear()
    elif isinstance(owner, type) or name in own_attributes(owner):
        delattr(owner, name)


def _named_parts(module: nn.Module) -> dict[str, Any]:
    """Return the submodules and weights of a module; each has a name of its own."""
    parts: dict[str, Any] = {f"module {p}": m for p, m in module.named_modules()}
    return parts | {f"weight {n}": t for n, t in weight_tensors(module).items()}


def _pickled(value: Any, names: Mapping[int, str]) -> bytes:
    stream = io.BytesIO()
    ModulePickler(stream, names, activations=False).dump(value)
    return stream.getvalue()


def _can_be_pickled(value: Any, names: Mapping[int, str]) -> bool:
    try:
        _pickled(value, names)
    except Exception:  # noqa: BLE001 - pickling a user's object can raise anything
        return False
    return True
