"""Hands tests to processes, as ``--dist loadgroup`` does, in less time."""

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Forget what has run.

    pytest-xdist counts the tests that a process has left after each of its tests, in
    all that it was ever given. With thousands of tests this took as long as many of
    them.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ForgetfulScheduling(LoadGroupScheduling):
        def mark_test_complete(
            self, node: Any, item_index: int, duration: float = 0
        ) -> None:
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            units = self.assigned_work[node]
            if all(units[scope].values()):
                del units[scope]

    return ForgetfulScheduling(config, log)
