"""Imports MeltingPot's substrate modules without its bots and TensorFlow.

The top package of MeltingPot imports the bots, and these import TensorFlow. Substrates
never use it, but it costs seconds and hundreds of megabytes per process. The few
modules that describe substrates are therefore imported below a top package whose own
code is not run. Afterwards they are removed from ``sys.modules`` and kept here, so that
``import meltingpot`` elsewhere imports the complete package. If meltingpot is already
imported, that import is used.
"""

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from marl_collect.errors import MissingPackageError

_PACKAGE = "meltingpot"
_lock = threading.RLock()
_modules: dict[str, ModuleType] = {}


@contextlib.contextmanager
def meltingpot_modules() -> Iterator[None]:
    """Make imports such as ``from meltingpot.configs import substrates`` work.

    Calls into these modules must be inside the block as well, because MeltingPot
    imports further modules when it is called.

    Raises:
        MissingPackageError: if dm-meltingpot is missing; names the command to install.
    """
    with _lock:
        if sys.modules.get(_PACKAGE):  # imported by the user or by an outer block
            yield
            return
        spec = _require_meltingpot()
        # The top package, without running its code.
        sys.modules.update(
            _modules or {_PACKAGE: importlib.util.module_from_spec(spec)}
        )
        try:
            yield
        finally:
            for name in [*sys.modules]:
                if name.partition(".")[0] == _PACKAGE:
                    _modules[name] = sys.modules.pop(name)


def import_meltingpot() -> Any:
    """Import the complete MeltingPot, with bots and TensorFlow.

    Raises:
        MissingPackageError: if dm-meltingpot is missing; names the command to install.
    """
    if _PACKAGE not in sys.modules:
        _require_meltingpot()
    import meltingpot

    return meltingpot


def _require_meltingpot() -> ModuleSpec:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise MissingPackageError(
            "MeltingPot environments need the package dm-meltingpot, which is not "
            "installed. Install it with: python scripts/install_meltingpot.py. If its "
            "archive of bots can be downloaded, this works too: pip install "
            "'marl-collect[meltingpot]'."
        )
    return spec
