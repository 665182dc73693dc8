"""Lets tensordict be imported without torch's compiler, until something compiles.

When it is imported, tensordict marks a few functions for ``torch.compile``. To mark
one, torch imports its compiler (``torch._dynamo``), which takes longer than the rest of
tensordict, and needs memory in every spawned worker. In processes that we start, the
functions are marked when the compiler is imported, which most of them never do.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final, TypeVar, cast, final

from typing_extensions import override

_COMPILER: Final = "torch._dynamo"
_MARKING: Final = ("allow_in_graph", "assume_constant_result")
"""Functions of ``torch.compiler`` that return what they mark."""

_EXCLUDED: Final = "__dynamo_disable"
"""Where torch keeps what replaces a function that it excludes, from its first call."""

F = TypeVar("F")


def import_compiler_late() -> None:
    """Defer the import of the compiler; does nothing if that is too late."""
    if not {"tensordict", _COMPILER} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


def exclude_late(function: Any) -> None:
    """Do not import the compiler only to exclude ``function`` from compilation.

    Torch excludes some functions, such as those of dispatch modes, when they are first
    called. If the import of the compiler was deferred, they are excluded after it.
    """
    excluded = getattr(function, "__wrapped__", None)
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if excluded is not None and finder is not None:
        setattr(excluded, _EXCLUDED, excluded)
        finder.waiting.append(excluded)


@final
class _Finder(MetaPathFinder):
    """Sees the imports of tensordict and of the compiler.

    Attributes:
        waiting: functions that torch has yet to exclude.
    """

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self._marks: list[tuple[str, Any]] = []

    @override
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        around = {"tensordict": self._unmarked, _COMPILER: self._mark}.get(fullname)
        if around is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader = cast("Any", spec.loader)
            execute = loader.exec_module
            loader.exec_module = lambda module: around(execute, module)
        return spec

    def _unmarked(self, execute: Callable[[Any], None], module: ModuleType) -> None:
        """Import tensordict; note what it marks."""
        import torch.compiler

        saved = {name: getattr(torch.compiler, name) for name in _MARKING}
        for name in _MARKING:
            setattr(torch.compiler, name, self._noting(name, saved[name]))
        try:
            execute(module)
        finally:
            for name, function in saved.items():
                setattr(torch.compiler, name, function)

    def _noting(self, name: str, mark: Callable[[F], F]) -> Callable[[F], F]:
        def note(function: F) -> F:
            if _COMPILER in sys.modules:
                return mark(function)
            self._marks.append((name, function))
            return function

        return note

    def _mark(self, execute: Callable[[Any], None], module: ModuleType) -> None:
        """Import the compiler, and mark what tensordict did."""
        sys.meta_path.remove(self)
        execute(module)
        for name, function in self._marks:
            getattr(module, name)(function)
        for function in self.waiting:
            delattr(function, _EXCLUDED)
