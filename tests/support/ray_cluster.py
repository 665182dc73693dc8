"""One Ray for all tests of a run: a cluster of two nodes on this machine.

    pytest_plugins = ["support.ray_cluster"]  # in a test module: the fixture `cluster`

Its workers are forked from the warm process of the tests; see ``ray_workers.py``. Ray
itself would start two interpreters per worker; with the imports of an actor, these take
six seconds of CPU time. Apart from that they are workers as
always: processes of their own that run Ray's program, and that can be killed.

A process that is connected to Ray must not fork: the child shares Ray's sockets, and
locks that Ray's threads hold at that moment. Tests that fork their process have the
mark ``forks``. Where Ray is connected they run in a process without it, and a test that
forks without the mark fails.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import pytest

from support import ray_workers
from support.processes import PATIENCE
from support.scripts import run_python, warm_process

STORE: Final = 80_000_000
"""Bytes of each node's object store; about the least that Ray accepts."""

ENVIRONMENT: Final = {
    # Ray's default of 15 starves actors on a busy machine. RayCollector sets it too.
    "RAY_worker_niceness": "0",
    # Ray gives up after 30 or 60 seconds.
    "RAY_worker_register_timeout_seconds": f"{PATIENCE}",
    "RAY_agent_register_timeout_ms": f"{PATIENCE}000",
}


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests with the cluster in one test process, because there is one Ray."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.timeout(2 * PATIENCE))


def _is_of_the_group(item: pytest.Item | None) -> bool:
    marks = () if item is None else item.iter_markers("xdist_group")
    return any(mark.args == ("ray",) for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that forks in a process that is not connected to Ray."""
    if pyfuncitem.get_closest_marker("forks") is None or not _connected():
        return None
    config = pyfuncitem.config
    process = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid),
        *("-c", str(config.inipath), "--rootdir", str(config.rootpath)),
        cwd=config.rootpath,
        timeout=2 * PATIENCE,  # The test's limit is shorter.
    )
    assert process.returncode == pytest.ExitCode.OK, process.stdout + process.stderr
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Fail a test that forked a process with Ray; end the cluster after its last test.

    The tests that a process runs later may fork then, and what runs no more takes no
    time from them. Without xdist tests with the cluster are not in a row.
    """
    result = yield
    # With the last test of all, `cluster` itself has ended.
    if "cluster" in getattr(item, "funcargs", ()) and nextitem and not _connected():
        pytest.fail("The test disconnected Ray: each later test would start its own.")
    in_a_row = "PYTEST_XDIST_WORKER" in os.environ
    if in_a_row and _is_of_the_group(item) and not _is_of_the_group(nextitem):
        _cluster.close()
    if _forks:
        lines = "\n".join(_forks)
        _forks.clear()
        pytest.fail(f"Ray's process was forked: mark the test `forks`.\n{lines}")
    return result


_forks: Final[list[str]] = []


def _note_a_fork() -> None:
    # `subprocess` forks too, but the child becomes another program at once.
    caller = sys._getframe(1)
    if caller.f_code.co_name != "_execute_child" and _connected():
        _forks.extend(traceback.format_stack(caller, 5))


os.register_at_fork(before=_note_a_fork)


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head with the resource ``home``, and a node with ``away``."""
    pytest.importorskip("ray")
    with _cluster:
        yield _cluster.enter_context(started())


_cluster: Final = ExitStack()


@contextmanager
def started() -> Iterator[Any]:
    """Start the cluster and connect to it."""
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    nodes: Any = Cluster()
    address = warm_process(os.getpid()).hex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", partial(_get_node, services.get_node))
        nodes.add_node = partial(
            nodes.add_node,
            setup_worker_path=ray_workers.__file__,
            env_vars=ENVIRONMENT | {ray_workers.ADDRESS: address},
            object_store_memory=STORE,
            include_dashboard=False,
            wait=False,
        )
        nodes.wait_for_nodes = partial(nodes.wait_for_nodes, PATIENCE)
        try:
            with pytest.MonkeyPatch.context() as start:
                start.setenv("RAY_USAGE_STATS_ENABLED", "0")
                start.setenv("RAY_gcs_server_port_wait_time_s", f"{PATIENCE}")
                nodes.add_node(num_cpus=16, resources={"home": 16})
                nodes.add_node(num_cpus=4, resources={"away": 4})
            nodes.wait_for_nodes()
            ray.init(address=nodes.address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def _get_node(get_node: Any, *args: Any) -> Any:
    """Wait for a node's registration; Ray itself fails 30 seconds after its start."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return get_node(*args)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(0.05)
