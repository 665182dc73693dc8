"""Runs every test of this folder with both implementations."""

from typing import Any

import pytest
from conformance_tools import Implementation
from differences import DIFFERENCES

IMPLEMENTATIONS = ("marl_collect", "torchrl")


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def implementation(request: Any) -> Implementation:
    """Return the library under test."""
    if request.param == "torchrl":
        pytest.importorskip("torchrl")
    return Implementation(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures of the table; a test that passes nevertheless fails."""
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None or "implementation" not in spec.params:
            continue
        # Fixtures with processes are shared; a second pytest process would have others.
        item.add_marker(pytest.mark.xdist_group("torchrl_conformance"))
        name = spec.params["implementation"]
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        for line in DIFFERENCES:
            if line.covers(item.name, name):
                item.add_marker(
                    pytest.mark.xfail(
                        raises=line.raises, strict=True, reason=line.reason
                    )
                )
