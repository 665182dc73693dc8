"""Imports MeltingPot's substrate modules without its bots and TensorFlow.

The top package of MeltingPot imports the bots, and these import TensorFlow. Substrates
never use it, but it costs seconds and hundreds of megabytes per process. The few
modules that describe substrates are therefore imported below a top package whose own
code is not run. Afterwards they are removed from ``sys.modules`` and kept here, so that
``import meltingpot`` elsewhere imports the complete package. If meltingpot is already
imported, that import is used.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_PACKAGE = "meltingpot"
_lock = threading.RLock()
_kept: dict[str, ModuleType] = {}


@contextlib.contextmanager
def meltingpot_modules() -> Iterator[None]:
    """Make imports such as ``from meltingpot.configs import substrates`` work.

    Calls into these modules must be inside the block as well, because MeltingPot
    imports further modules when it is called.

    Raises:
        ImportError: if dm-meltingpot is missing; names the command to install it.
    """
    with _lock:
        if _PACKAGE in sys.modules:  # imported by the user or by an outer block
            yield
            return
        _require_meltingpot()
        sys.modules.update(_kept or {_PACKAGE: _package()})
        try:
            yield
        finally:
            for name in [n for n in sys.modules if _is_ours(n)]:
                _kept[name] = sys.modules.pop(name)


def import_meltingpot() -> Any:
    """Import the complete MeltingPot, with bots and TensorFlow.

    Raises:
        ImportError: if dm-meltingpot is missing; names the command to install it.
    """
    _require_meltingpot()
    import meltingpot

    return meltingpot


def _is_ours(name: str) -> bool:
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


def _require_meltingpot() -> None:
    if _PACKAGE not in sys.modules and importlib.util.find_spec(_PACKAGE) is None:
        raise ImportError(
            "MeltingPot environments need the package dm-meltingpot, which is not "
            "installed. Install it with: python scripts/install_meltingpot.py. If its "
            "archive of bots can be downloaded, this works too: pip install "
            "'marl-collect[meltingpot]'."
        )


def _package() -> ModuleType:
    """Return the top package without running its code."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
