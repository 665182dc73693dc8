"""Pickles what is sent to another process of this package, with cloudpickle.

Functions and classes of modules are sent by name, and the receiver imports the module.
Yet a module may be here that it could not import: loaded from a file by path, as test
runners and configuration libraries do, run by ``runpy``, made by hand, the script of a
``multiprocessing`` child, or from a folder that has left ``sys.path``. The functions
and classes of these are sent by value, as cloudpickle sends those of ``__main__``. What
``functools`` makes of them goes with them; its caches stay here. What ran when a class
was made, such as its registration, does not run again.

A module is asked for once, not with every message. It stays registered as one that
cloudpickle sends by value, because no other process could import it either.
"""

import contextlib
import functools
import io
import os
import sys
import sysconfig
from importlib.machinery import FileFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NewType, ParamSpec, TypeVar, TypeVarTuple

import cloudpickle

_NAMED: Final = (type, FunctionType, ModuleType, TypeVar)
_Cached: Final = type(functools.cache(len))
_COMPILED: Final = (".so", ".pyd")
_SITES: Final = {"site-packages", "dist-packages"}
_STANDARD: Final = Path(sysconfig.get_path("stdlib"))

_OWN: Final = f"{__name__.partition('.')[0]}."

_importable: Final[dict[tuple[str, str | None], bool]] = {}
"""By name and file of a module: whether a new process could import it."""
_searched: list[str | None] = []
"""Where modules were searched for: ``sys.path`` and the working directory."""


def dumps(value: object) -> bytes:
    """Pickle a value that another process unpickles with ``pickle.loads``."""
    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


class Pickler(cloudpickle.Pickler):
    """Sends modules that another process could not import by value."""

    def __init__(self, stream: io.BytesIO) -> None:
        """Write to ``stream``."""
        super().__init__(stream, protocol=5)
        where = [*sys.path, working_directory() if "" in sys.path else None]
        if where != _searched:
            _importable.clear()
            _searched[:] = where

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled."""
        kind = type(obj)  # What __class__ says may be made up.
        if kind is _Cached and not _is_found(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if kind in (ParamSpec, TypeVarTuple) and not _is_found(obj):
            return kind, (obj.__name__,)
        if kind is NewType and not _is_found(obj):
            return kind, (obj.__name__, obj.__supertype__)
        if kind is functools.cached_property:  # It has a lock in Python 3.11.
            return _cached_property, (obj.func, obj.attrname)
        if issubclass(kind, _NAMED):
            name = obj.__name__ if issubclass(kind, ModuleType) else obj.__module__
            module = sys.modules.get(name)
            if (
                isinstance(module, ModuleType)
                and module.__name__ == name  # cloudpickle registers this name.
                and not _can_import(name, module)
            ):
                cloudpickle.register_pickle_by_value(module)
        reduced = super().reducer_override(obj)
        if issubclass(kind, type) and isinstance(reduced, tuple):
            make, (maker, *arguments), *state = reduced
            if maker is kind:  # cloudpickle calls it with name, bases and attributes.
                return make, (_maker(obj), *arguments), *state
        return reduced


def _maker(cls: type) -> Any:
    """Return what makes a class without calling code of the user's script."""
    kind: Any = type(cls)
    hooked = [
        base
        for base in cls.__mro__[1:]
        if "__init_subclass__" in vars(base) and not _is_found(base)
    ]
    if not hooked and _is_found(kind):
        return kind
    return functools.partial(_make, kind, next(filter(_is_found, kind.__mro__)), hooked)


def _make(kind: Any, library: Any, hooked: list[Any], *arguments: Any) -> Any:
    # A base that refers to the class has no hook yet.
    hooks = {base: vars(base).get("__init_subclass__") for base in hooked}
    for base, hook in hooks.items():
        if hook is not None:
            del base.__init_subclass__
    try:
        return library.__new__(kind, *arguments)
    finally:
        for base, hook in hooks.items():
            if hook is not None:
                base.__init_subclass__ = hook


def _is_found(obj: Any) -> bool:
    """Return whether a new process finds an object by its name in a module."""
    name = str(getattr(obj, "__module__", None))
    found: Any = sys.modules.get(name)
    if name == "__main__" or not isinstance(found, ModuleType):
        return False
    if not _can_import(found.__name__, found):
        return False
    path = getattr(obj, "__qualname__", getattr(obj, "__name__", ""))
    for part in path.split("."):  # A partial has none.
        found = getattr(found, part, None)
    return found is obj


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    # Python names it when it makes a class, and not when an attribute is set.
    made = functools.cached_property(function)
    made.attrname = name
    return made


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` as it is searched here, also after a change of directory.

    A relative folder of it stays where Python first searched it.
    """
    finders = ((entry, sys.path_importer_cache.get(entry)) for entry in sys.path)
    return tuple(
        finder.path if isinstance(finder, FileFinder) else str(entry)
        for entry, finder in finders
    )


def working_directory() -> str | None:
    """Return the working directory; None if it has been deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return None


def _can_import(name: str, module: ModuleType) -> bool:
    """Return whether a new process with our ``sys.path`` would import this module."""
    key = name, vars(module).get("__file__")
    found = _importable.get(key)
    if found is None:
        found = _importable[key] = _search(*key)
    return found


def _search(name: str, file: str | None) -> bool:
    parent_name, _, _ = name.rpartition(".")
    # cloudpickle sends the first by value, and workers have the second.
    if name == "__main__" or name.startswith(_OWN):
        return True
    # Compiled modules cannot be sent.
    if file is not None and (_is_installed(file) or file.endswith(_COMPILED)):
        return True
    path = None
    if parent_name:
        parent = sys.modules.get(parent_name)
        if not isinstance(parent, ModuleType) or not _can_import(parent_name, parent):
            return False
        if file is None:
            return True  # Its parent makes it.
        path = vars(parent).get("__path__")
    for finder in filter(_has_every_process, sys.meta_path):
        spec = finder.find_spec(name, path)
        if spec is not None:
            return file is None or _is_same(spec.origin, file)
    return False


def _is_installed(file: str) -> bool:
    path = Path(file)
    return not _SITES.isdisjoint(path.parts) or _STANDARD in path.parents


def _has_every_process(finder: Any) -> bool:
    """Return whether a finder is Python's, or of a library such as an editable install.

    Every process of this interpreter has these, but not those of the user's script.
    """
    name = str(getattr(finder, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("_frozen_importlib") or bool(file and _is_installed(file))


def _is_same(origin: str | None, file: str) -> bool:
    if origin is None:  # A folder without __init__.py.
        return False
    with contextlib.suppress(OSError):  # One in a zip file has no folder.
        return os.path.samefile(origin, file)
    return origin == file
