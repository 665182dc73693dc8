"""``pytest --fast`` runs every test that starts no process, ``--processes`` the others.

Some rooms are about processes. Elsewhere tests that start one are marked ``processes``,
a module by its ``pytestmark``, a test by its decorator. With ``--fast`` a test without
the mark that starts one fails.

The functions that start a process are replaced. Processes that a running one starts
for us, as the fork server and Ray do, need no call: the running one was not started.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOMS: Final = {"collectors", "distributed", "faults", "parallel_env", "processes"}
"""Folders of which every test counts as one that starts a process."""
MARK: Final = "processes"
_OF_MODULE: Final = re.compile(
    rf"^pytestmark = (\[[^\]]*)?pytest\.mark\.{MARK}\b", re.MULTILINE
)
_STARTS: Final = (
    "_posixsubprocess.fork_exec",  # Called by `multiprocessing`.
    "subprocess._fork_exec",
    *("os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.system"),
)
"""Functions that start a process; all others of Python call one of them.

An audit hook would see them too, but Python calls it for every ``id()`` as well, which
copies of modules and walks through their state use all the time.
"""
_LOOK_UPS: Final = (
    *("ctypes.util", "glfw.library", "platform", "uuid"),
    "matplotlib.font_manager",  # Once per computer, before there is a list of fonts.
)
"""Modules that ask a program, such as ``ldconfig`` or ``uname``, when libraries are
imported. No test is about that."""


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--fast``, let a test fail that starts a process."""
    if not request.config.getoption("fast"):
        yield
        return
    started: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        module, _, function = name.rpartition(".")
        start: Any = getattr(importlib.import_module(module), function)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if not _looks_up():
                started.append(name)
            return start(*args, **kwargs)

        return noted

    # Not the test's own MonkeyPatch, which would then be undone after its fixtures.
    with pytest.MonkeyPatch.context() as patch:
        for name in _STARTS:
            patch.setattr(name, noting(name))
        yield
    assert not started, f"starts a process: mark it @pytest.mark.{MARK}"


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test will run; this takes seconds."""
    if collection_path.suffix != ".py" or not config.getoption("fast"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return collection_path.parent.name in ROOMS or bool(_OF_MODULE.search(text)) or None


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
