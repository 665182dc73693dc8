"""Pools, and the ways of starting their workers."""

from collections.abc import Iterator

import pytest
from pool_tools import obey

from marl_collect.processes import WorkerPool


@pytest.fixture(params=["forkserver", "spawn"])
def start_method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(obey, ["a", "b", "c"]) as pool:
        yield pool


@pytest.fixture
def any_pool(start_method: str) -> Iterator[WorkerPool]:
    """For tests that may depend on the start method."""
    with WorkerPool(obey, ["a", "b", "c"], start_method=start_method) as pool:
        yield pool
