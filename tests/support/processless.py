"""``pytest --fast`` runs every test that starts no process, ``--processes`` the others.

Some rooms are about processes. Elsewhere tests that start one are marked ``processes``,
a module by its ``pytestmark``, a test by its decorator. ``--fast`` refuses to start a
process, and an unmarked test that tries fails, so that no mark is missing.

The functions that start a process are replaced. Processes that a running one starts
for us, as the fork server and Ray do, need no call: the running one was not started.
"""

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import pytest

ROOMS: Final = {"collectors", "distributed", "faults", "parallel_env", "processes"}
"""Folders of which every test counts as one that starts a process."""
MARK: Final = "processes"
_OF_MODULE: Final = re.compile(
    rf"^pytestmark = (\[[^\]]*)?pytest\.mark\.{MARK}\b", re.MULTILINE
)
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


class StartsProcessError(pytest.fail.Exception):  # type: ignore[name-defined]
    """Leaves a test where it starts a process; ``except Exception`` lets it pass."""


class Guard:
    """Refuses to start processes while a test runs, and lets such a test fail."""

    def __init__(self) -> None:
        self._refused = self._running = False
        for name, functions in _STARTS.items():
            module: Any = importlib.import_module(name)
            for function in functions:
                refusing = self._refusing(f"{name}.{function}", vars(module)[function])
                setattr(module, function, refusing)

    def _refusing(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if not self._running or _looks_up():
                return start(*args, **kwargs)
            self._refused = True
            if threading.current_thread() is threading.main_thread():
                raise StartsProcessError(name)
            raise OSError(f"pytest --fast starts no process ({name})")

        return refusing

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Refuse from the first fixture to the last."""
        self._refused, self._running = False, True
        try:
            return (yield)
        finally:
            self._running = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Let a test fail that starts a process, whatever it made of the refusal."""
        report = yield
        # A fixture that was refused before raises the same error again.
        raised = call.excinfo is not None and call.excinfo.errisinstance(
            StartsProcessError
        )
        if self._refused or raised:
            self._refused = False
            vars(report).pop("wasxfail", None)
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} starts a process: mark it @pytest.mark.{MARK}"
            )
        return report


def _looks_up() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOOK_UPS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption(
        "--fast", action="store_true", help="run only tests that start no process"
    )
    parser.addoption(
        "--processes", action="store_true", help="run only tests that --fast leaves out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse processes in the processes that run the tests."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption(
        "numprocesses", 0
    )
    if config.getoption("fast") and runs_tests:
        config.pluginmanager.register(Guard(), "processless-guard")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test will run; this takes seconds."""
    fast, processes = config.getoption("fast"), config.getoption("processes")
    if collection_path.suffix != ".py" or not (fast or processes):
        return None
    if collection_path.parent.name in ROOMS:
        return fast or None
    text = collection_path.read_text(encoding="utf-8")
    if fast:
        return bool(_OF_MODULE.search(text)) or None
    return f"mark.{MARK}" not in text or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin no test that is marked, or these tests only."""
    fast, processes = config.getoption("fast"), config.getoption("processes")
    if fast or processes:
        chosen = [
            item
            for item in items
            if bool(item.get_closest_marker(MARK) or item.path.parent.name in ROOMS)
            == processes
        ]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen
