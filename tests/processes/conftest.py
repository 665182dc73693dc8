"""Pools, and the ways of starting their workers."""

from collections.abc import Iterator

import pytest
from pool_tools import obey

from marl_collect.processes import WorkerPool
from marl_collect.processes.launcher import StartMethod


@pytest.fixture(params=["forkserver", "spawn"])
def start_method(request: pytest.FixtureRequest) -> StartMethod:
    return request.param


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(obey, ["a", "b", "c"]) as pool:
        yield pool


@pytest.fixture
def any_pool(start_method: StartMethod) -> Iterator[WorkerPool]:
    """For tests that may depend on the start method."""
    with WorkerPool(obey, ["a", "b", "c"], start_method=start_method) as pool:
        yield pool
