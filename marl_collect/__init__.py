"""Multi-agent data collection for PyTorch, at the speed of the environments.

Importing this package costs milliseconds: a public name loads its module when it is
first used. A new name goes into the table, the imports for type checkers and `__all__`;
`tests/test_import.py` compares the three.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__version__ = "0.1.0"

__all__: list[str] = []

# Public name -> the module that defines it.
_MODULES: dict[str, str] = {}


def __getattr__(name: str) -> object:
    """Loads a public name's module; the name is an ordinary global from then on."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
