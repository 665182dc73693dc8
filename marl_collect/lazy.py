"""Public names that load their module on first use.

A package imports its public names once, under ``if TYPE_CHECKING:``, where type
checkers read them, and ends with::

    __getattr__, __dir__ = lazy.attach(__name__)

The names are read from that block when the first of them is used, so importing the
package imports nothing else, and no name is listed twice.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def attach(
    package: str, extra_of: Callable[[str], str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for the module called ``package``.

    Args:
        package: its name.
        extra_of: returns the extra of this package that installs what a module of
            ``package`` imports, for the error if it cannot be imported.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the module's own
        if name == "__all__":
            return sorted(public_names(package))
        if name.startswith("__") or name not in public_names(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = public_names(package)[name]
        try:
            value = getattr(importlib.import_module(module), attribute)
        except ImportError:
            if extra_of is None:
                raise
            from marl_collect.errors import imports_of

            with imports_of(extra_of(module), name):
                raise
        # An ordinary global from now on.
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807 - it becomes the module's own
        return sorted({*vars(sys.modules[package]), *public_names(package)})

    return __getattr__, __dir__


@cache
def public_names(package: str) -> dict[str, tuple[str, str]]:
    """Return each public name of ``package`` with its module and its name there.

    Raises:
        ImportError: if the package's source cannot be read.
    """
    spec = importlib.util.find_spec(package)
    loader: Any = None if spec is None else spec.loader
    source = None if loader is None else loader.get_source(package)
    if source is None:
        raise ImportError(
            f"{package} reads its public names from its source, which was not found. "
            "Install the package with its .py files."
        )
    return {
        alias.asname or alias.name: (f"{statement.module}", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
