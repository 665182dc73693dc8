"""``pytest --fast``: every test that starts no process.

No list names these tests. Each test is begun. Where the test or one of its fixtures
starts a process, the start is refused, and the test is left and reported as "starts a
process"; whatever else happens in it does not count. A test cannot be on the wrong
side, therefore, and in such a run nothing can start a process.

Starts are seen through Python's audit events. Processes that a running one starts for
us, as the fork server and Ray do, need no event: the running one was not started.
"""

import importlib
import sys
import threading
from collections.abc import Generator
from typing import Any, Final

import pytest
from _pytest.outcomes import Skipped

_EVENTS: Final = frozenset(
    (
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "subprocess.Popen",
    )
)
_LOOK_UPS: Final = ("ctypes.util", "platform", "uuid")
"""Modules of the standard library that ask a program, such as ``ldconfig`` or
``uname``, when other libraries are imported. No test is about that."""


REASON: Final = "starts a process, and --fast runs what starts none"
"""As in ``expected_skips.txt``."""


class StartsProcess(Skipped):
    """Leaves a test at the place where it starts a process."""


class Processless:
    """Refuses to start processes while a test runs."""

    def __init__(self) -> None:
        self._refused = False
        self._left = False
        self._running = False
        sys.addaudithook(self._audit)
        # `multiprocessing` calls this function itself, which raises no audit event.
        module: Any = importlib.import_module("_posixsubprocess")
        start = module.fork_exec

        def fork_exec(*args: Any) -> int:
            self._refuse("multiprocessing")
            return start(*args)

        module.fork_exec = fork_exec

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._running and event in _EVENTS:
            self._refuse(event)

    def _refuse(self, what: str) -> None:
        if not self._running or _looks_up():
            return
        self._refused = True
        if threading.current_thread() is not threading.main_thread():
            # Skipping is for the thread of the test.
            raise OSError(f"pytest --fast starts no process ({what})")
        raise StartsProcess(f"starts a process ({what})")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Refuse from the first fixture to the last."""
        self._refused, self._left, self._running = False, False, True
        try:
            return (yield)
        finally:
            self._running = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn what became of a test that starts a process into a skip."""
        report = yield
        # A fixture that was refused before raises the same exception again.
        again = call.excinfo is not None and call.excinfo.errisinstance(StartsProcess)
        if self._refused or again:
            report.sections.clear()
            if self._left:
                report.outcome, report.longrepr = "passed", None
            else:
                path, line, _ = report.location
                report.outcome = "skipped"
                report.longrepr = (path, line or 0, f"Skipped: {REASON}")
                vars(report).pop("wasxfail", None)
                vars(report)["starts_process"] = True
                self._left = True
        return report


def _looks_up() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOOK_UPS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fast``."""
    parser.addoption(
        "--fast",
        action="store_true",
        help="run only what starts no process; leave other tests where they start one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse processes in the process that runs the tests."""
    running = hasattr(config, "workerinput") or not config.getoption("numprocesses", 0)
    if config.getoption("fast") and running:
        config.pluginmanager.register(Processless(), "processless")


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """Name the outcome."""
    if getattr(report, "starts_process", False):
        return "starts a process", "p", "STARTS A PROCESS"
    return None
