"""Lets TorchRL's bounded specs clamp without asking first whether they have to.

``project`` of a spec reads in Python whether a value is within its bounds, and clamps
it only if it is not. With noise the answer differs from frame to frame, so no recording
would stay valid. Clamping a value that is within its bounds does not change it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SPECS = "torchrl.data.tensor_specs"
_LOCK = threading.RLock()  # Two threads at once would restore each other's function.


@contextmanager
def without_branches() -> Iterator[None]:
    """Clamp without branches while this context is open.

    The change is visible to other threads, for which the results stay the same.
    """
    specs = sys.modules.get(SPECS)
    if specs is None:  # No module of the policy can have a spec.
        yield
        return
    bounded: Any = specs.Bounded
    with _LOCK:
        kept = vars(bounded).get("project")
        bounded.project = lambda spec, value: spec._project(value)  # noqa: SLF001
        try:
            yield
        finally:
            if kept is None:
                del bounded.project
            else:
                bounded.project = kept
