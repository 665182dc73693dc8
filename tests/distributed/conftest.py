"""One Ray for all tests of this folder: a cluster of three nodes on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STORE = 80_000_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all of them in one test process, because there is one Ray."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """A head with the resource ``home``, and two nodes with ``away``."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 16, "resources": {"home": 16}, "include_dashboard": False}
    nodes = Cluster(
        initialize_head=True, head_node_args={**head, "object_store_memory": STORE}
    )
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=4, resources={"away": 4}, object_store_memory=STORE)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
