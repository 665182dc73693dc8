"""Lets TorchRL's specs clamp values without a branch in Python.

``project`` of bounded specs reads in Python whether a value is within its bounds, and
clamps it only if it is not. With noise the answer differs from frame to frame, so no
recording would stay valid. Clamping a value that is within its bounds does not change
it.
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
    """Clamp unconditionally in this thread while this context is open."""
    specs = sys.modules.get(SPECS)
    if specs is None:  # No module of the policy can have a spec.
        yield
        return
    bounded: Any = specs.Bounded
    thread = threading.get_ident()
    with _LOCK:
        replaced, original = vars(bounded).get("project"), bounded.project

        def project(spec: Any, value: Any) -> Any:
            if threading.get_ident() != thread:
                return original(spec, value)
            return spec._project(value)  # noqa: SLF001

        bounded.project = project
        try:
            yield
        finally:
            if replaced is None:
                del bounded.project
            else:
                bounded.project = replaced
