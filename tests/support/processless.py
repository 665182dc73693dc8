"""``pytest --fast`` runs every test that starts no process, ``--processes`` the others.

``tests/processes.txt`` lists the tests that start one; ``--fast`` does not begin them.
It refuses to start a process, and a test that tries fails, so that the list is
complete. ``pytest --list-processes FILES`` writes the lines of these files anew: it
begins every test, and leaves it where it or a fixture starts a process.

The functions that start a process are replaced. Processes that a running one starts
for us, as the fork server and Ray do, need no call: the running one was not started.
"""

import functools
import importlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import pytest

LIST: Final = Path(__file__).parents[1] / "processes.txt"
_HEADER: Final = """\
# Tests that start a process: files, functions, and cases of functions.
# Written by `pytest --list-processes FILES`.
"""
_STARTS: Final = {
    "_posixsubprocess": ("fork_exec",),  # Called by `multiprocessing`.
    "os": (
        *("execv", "execve", "fork", "forkpty", "posix_spawn", "posix_spawnp"),
        "system",
    ),
    "subprocess": ("_fork_exec",),
}
"""Functions that start a process, by module; all others of Python call one of them.

An audit hook would see them too, but Python calls it for every ``id()`` as well, which
copies of modules and walks through their state use all the time.
"""
_LOOK_UPS: Final = ("ctypes.util", "glfw.library", "platform", "uuid")
"""Modules that ask a program, such as ``ldconfig`` or ``uname``, when libraries are
imported. No test is about that."""
_ID: Final = pytest.StashKey[str]()
"""The test's id, to which pytest-xdist may append a group."""


class StartsProcess(pytest.skip.Exception):  # type: ignore[name-defined]
    """Leaves a test at the place where it starts a process."""


class Guard:
    """Refuses to start processes while a test runs.

    Args:
        listing: whether to report such a test as one that starts a process, whatever
            else happens in it, instead of a failure.
    """

    def __init__(self, listing: bool) -> None:
        self._listing = listing
        self._refused = False
        self._left = False
        self._running = False
        for name, functions in _STARTS.items():
            module: Any = importlib.import_module(name)
            for function in functions:
                refusing = self._refusing(f"{name}.{function}", vars(module)[function])
                setattr(module, function, refusing)

    def _refusing(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            self._refuse(name)
            return start(*args, **kwargs)

        return refusing

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
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a test that starts a process, whatever it made of the refusal."""
        report = yield
        name = vars(report)["test_id"] = item.stash[_ID]
        # A fixture that was refused before raises the same exception again.
        starts_process = call.excinfo is not None and call.excinfo.errisinstance(
            StartsProcess
        )
        if not (self._refused or starts_process):
            return report
        report.sections.clear()
        vars(report).pop("wasxfail", None)
        if self._left:
            report.outcome, report.longrepr = "passed", None
        elif self._listing:
            path, line, _ = report.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, "Skipped: starts a process")
            vars(report)["starts_process"] = True
        else:
            report.outcome = "failed"
            report.longrepr = (
                f"{name} starts a process, which tests/processes.txt does not say: run "
                f"pytest --list-processes {name.partition('::')[0]}"
            )
        self._left = True
        return report


def _looks_up() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOOK_UPS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Lister:
    """Collects the outcomes of ``--list-processes``, and writes the list."""

    def __init__(self) -> None:
        self._starts: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note whether the test starts a process."""
        name = getattr(report, "test_id", report.nodeid)
        starts = getattr(report, "starts_process", False)
        self._starts[name] = self._starts.get(name, False) or starts

    def pytest_sessionfinish(self) -> None:
        """Write the lines of the files that ran, and keep those of others."""
        files = {_parents(name)[0] for name in self._starts}
        lines = {line for line in listed() if _parents(line)[0] not in files}
        lines |= summary(self._starts)
        LIST.write_text(_HEADER + "".join(f"{line}\n" for line in sorted(lines)))


def summary(starts: dict[str, bool]) -> set[str]:
    """Return lines for tests; a file or function stands for all of its cases."""
    members = defaultdict(list)
    for name, does in starts.items():
        for parent in _parents(name):
            members[parent].append(does)
    return {
        next(parent for parent in _parents(name) if all(members[parent]))
        for name, does in starts.items()
        if does
    }


def _parents(name: str) -> list[str]:
    """Return the test's file, its function, and itself."""
    function = name.partition("[")[0]
    return [name.partition("::")[0], function, name]


@functools.cache
def listed() -> set[str]:
    """Return the lines of the list."""
    if not LIST.exists():
        return set()
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption(
        "--fast", action="store_true", help="run only tests that start no process"
    )
    parser.addoption(
        "--processes", action="store_true", help="run only tests that --fast leaves out"
    )
    parser.addoption(
        "--list-processes",
        action="store_true",
        help="write the lines of the collected files in tests/processes.txt anew",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse processes in the process that runs the tests, and list in the first."""
    listing = config.getoption("list_processes")
    narrowed = "::" in "".join(config.args) or config.option.keyword
    if listing and (narrowed or config.option.markexpr):
        raise pytest.UsageError(
            "--list-processes writes the lines of whole files anew: omit -k, -m and ::"
        )
    is_worker = hasattr(config, "workerinput")
    if listing or config.getoption("fast"):
        if is_worker or not config.getoption("numprocesses", 0):
            config.pluginmanager.register(Guard(listing), "processless-guard")
        if listing and not is_worker:
            config.pluginmanager.register(Lister(), "processless-lister")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test will run; this takes seconds."""
    fast, processes = config.getoption("fast"), config.getoption("processes")
    if collection_path.suffix != ".py" or not (fast or processes):
        return None
    name = os.path.relpath(collection_path, config.rootpath)
    files = {line.partition("::")[0] for line in listed()}
    return (fast and name in listed()) or (processes and name not in files) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin no test that is listed, or these tests only."""
    for item in items:
        item.stash[_ID] = item.nodeid
    if config.getoption("fast") or config.getoption("processes"):
        deselected = _matching(items, listed())
        if config.getoption("processes"):
            deselected = set(items) - deselected
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=list(deselected))


def _matching(items: list[pytest.Item], lines: set[str]) -> set[pytest.Item]:
    return {item for item in items if not lines.isdisjoint(_parents(item.nodeid))}


def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, str] | None:
    """Name the outcome."""
    if getattr(report, "starts_process", False):
        return "starts a process", "p", "STARTS A PROCESS"
    return None
