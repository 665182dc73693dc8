"""MeltingPot's substrate modules without its bots, hence without TensorFlow.

The top package of MeltingPot imports its bots, these TensorFlow: seconds and hundreds
of megabytes in every process, for modules that a substrate never calls. So the few
modules that describe substrates are imported below a top package whose own code is not
run. All of these are taken out of ``sys.modules`` again, and kept here: whoever then
imports meltingpot or tensorflow gets the whole, as if this module were not there.
Where meltingpot was imported before, that one is used.
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
    """Let ``from meltingpot.configs import substrates`` and its like work.

    MeltingPot itself imports more of its modules as it goes, so whatever calls into
    it belongs inside too.

    Raises:
        ImportError: naming the extra to install, if dm-meltingpot is missing.
    """
    with _lock:
        if _PACKAGE in sys.modules:  # the user's own import, or an outer block
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
    """Return the whole of MeltingPot, bots and TensorFlow included.

    Raises:
        ImportError: naming the extra to install, if it is missing.
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
            "installed. Install it with: python scripts/install_meltingpot.py, or pip "
            "install 'marl-collect[meltingpot]' where its archive of bots can be "
            "downloaded."
        )


def _package() -> ModuleType:
    """Return the top package, its code not run."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
