"""Runs tests of this folder with both implementations."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conformance_tools import IMPLEMENTATIONS, Implementation
from differences import DIFFERENCES


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: Any) -> Implementation:
    """Return the library under test."""
    if request.param == "torchrl":
        pytest.importorskip("torchrl")
    return Implementation(request.param)


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[..., Any]]:
    """Calls a function, or returns what it returned before for equal arguments.

    What has a ``close`` is closed after the tests of the module. A fixture with
    parameters would be built again whenever these change, often in random order.
    """
    with ExitStack() as stack:

        @cache
        def call(build: Callable[..., Any], *args: Any, **options: Any) -> Any:
            result = build(*args, **options)
            if hasattr(result, "close"):
                stack.callback(result.close)
            return result

        yield call


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures of the table; a test that passes nevertheless fails."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        # Fixtures with processes are shared; a second pytest process would have others.
        item.add_marker(pytest.mark.xdist_group("torchrl_conformance"))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        spec = getattr(item, "callspec", None)
        name = spec.params.get("implementation") if spec is not None else None
        for line in DIFFERENCES:
            if line.covers(item.name, name):
                item.add_marker(
                    pytest.mark.xfail(
                        raises=line.raises, strict=True, reason=line.reason
                    )
                )
