"""What errors say, and how they travel."""

import contextlib
import pickle
import re
import signal
import threading
import traceback
from functools import partial
from typing import Any

import pytest

from marl_collect.errors import (
    Failure,
    WorkerError,
    describe_exit,
    raise_failure,
    unpicklable,
    warn,
    worker_error_of,
)


class AwkwardError(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class BrokenTextError(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class SlottedError(Exception):
    """Rebuilds itself without its dictionary, and so without notes."""

    def __reduce__(self) -> Any:
        return SlottedError, self.args


def capture(exception: BaseException, **place: Any) -> Failure:
    with contextlib.suppress(type(exception)):
        raise exception
    return Failure.capture(exception, **place)


def travel(failure: Failure, worker: int = 3) -> BaseException:
    with pytest.raises(BaseException) as excinfo:  # noqa: PT011 - any may come
        raise_failure(pickle.loads(pickle.dumps(failure)), worker)
    return excinfo.value


def test_an_exception_keeps_its_type_arguments_and_attributes() -> None:
    original: Any = KeyError("agent_3")
    original.extra = [1, 2]
    error = travel(capture(original, pid=12, phase="step", environment=7))
    assert type(error) is KeyError
    assert error.args == ("agent_3",)
    assert vars(error)["extra"] == [1, 2]
    cause = worker_error_of(error)
    assert cause is error.__cause__
    assert (cause.worker, cause.pid, cause.phase, cause.environment) == (
        3,
        12,
        "step",
        7,
    )


def test_the_traceback_of_the_worker_is_in_the_text_with_causes_and_notes() -> None:
    try:
        try:
            {}["observation"]
        except KeyError as error:
            error.add_note("note of the cause")
            raise ValueError("bad level") from error
    except ValueError as error:
        error.add_note("note of the error")
        failure = Failure.capture(error, pid=5, phase="create", environment=0)
    text = str(travel(failure).__cause__)
    assert text.startswith(
        "Worker 3 (pid 5) failed in create of environment 0: ValueError: bad level"
    )
    for expected_text in (
        'test_errors.py", line',
        "KeyError: 'observation'",
        "note of the cause",
        "note of the error",
    ):
        assert expected_text in text


@pytest.mark.parametrize("kind", [ValueError, SlottedError])
def test_notes_arrive_once(kind: Any) -> None:
    original = kind("text")
    original.add_note("first")
    original.add_note("second")
    assert travel(capture(original)).__notes__ == ["first", "second"]


@pytest.mark.parametrize(
    "exception",
    [
        AwkwardError("text", 3),
        ValueError(threading.Lock()),
        KeyboardInterrupt(),
        SystemExit(2),
        GeneratorExit(),
        StopIteration(1),
        StopAsyncIteration(1),
        BrokenTextError(threading.Lock()),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_what_cannot_travel_or_would_mean_something_else_is_a_worker_error(
    exception: Any,
) -> None:
    error = travel(capture(exception))
    assert type(error) is WorkerError
    assert type(exception).__name__ in str(error)
    assert worker_error_of(error) is error


def test_an_exception_without_a_text_that_works_still_travels() -> None:
    assert type(travel(capture(BrokenTextError()))) is BrokenTextError
    assert "<its __str__ failed>" in capture(BrokenTextError()).summary


def test_a_class_that_the_trainer_cannot_rebuild_becomes_a_worker_error() -> None:
    failure = capture(ValueError("text"))
    broken = Failure(failure.summary, failure.remote_traceback, b"not a pickle", ())
    assert type(travel(broken)) is WorkerError


def test_an_exception_group_travels_whole() -> None:
    error = travel(capture(ExceptionGroup("many", [ValueError(1), KeyError(2)])))
    assert isinstance(error, ExceptionGroup)
    assert [type(exception) for exception in error.exceptions] == [ValueError, KeyError]


def test_a_worker_error_of_a_nested_pool_is_raised_from_the_outer_one() -> None:
    inner_error = WorkerError(1, exitcode=-9)
    error = travel(capture(inner_error), worker=0)
    assert isinstance(error, WorkerError)
    assert (error.worker, worker_error_of(error).worker) == (1, 0)


def test_a_worker_error_survives_pickling() -> None:
    original = WorkerError(3, "hung 5 s", "why", 7, -9, "step", 2, "Traceback ...")
    copy = pickle.loads(pickle.dumps(original))
    assert vars(copy) == vars(original)
    assert str(copy) == str(original)


TEXTS: dict[str, WorkerError] = {
    "Worker 3 ended unexpectedly": WorkerError(3),
    "Worker 3 (pid 5) ended unexpectedly while idle: exit code 1": WorkerError(
        3, detail="exit code 1", pid=5, phase="idle"
    ),
    "Worker 0 hung 300 s in step of environment 8": WorkerError(
        0, "hung 300 s", phase="step", environment=8
    ),
    "Worker 0 failed: ValueError\n\nTraceback in the worker:\nTraceback\n  x": (
        WorkerError(0, "failed", "ValueError", remote_traceback="Traceback\n  x\n")
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_worker_errors_say_who_what_where_and_why(text: str) -> None:
    assert str(TEXTS[text]) == text


EXIT_CODES: dict[str, int | None] = {
    "exit code 0": 0,
    "exit code 3": 3,
    "killed by SIGKILL (often the out-of-memory killer, see dmesg: use fewer workers "
    "or smaller batches)": -signal.SIGKILL,
    "killed by SIGSEGV (a crash in compiled code; its Python stack is on stderr)": (
        -signal.SIGSEGV
    ),
    "killed by SIGUSR1": -signal.SIGUSR1,
    "killed by signal 63": -63,
    "it closed its socket but is still running": None,
}


@pytest.mark.parametrize("text", EXIT_CODES)
def test_exit_codes_are_described_in_words(text: str) -> None:
    assert describe_exit(EXIT_CODES[text]) == text


def test_an_exception_from_elsewhere_has_no_worker_error() -> None:
    assert worker_error_of(ValueError("here")) is None


LONG = "a line\n" * 3_000_000  # More than is pickled


def causes(kind: str) -> BaseException:
    """Return an exception that has a long text somewhere."""
    error: Exception = ValueError(LONG if kind == "message" else "short")
    if kind == "note":
        error.add_note(LONG)
    elif kind == "cause":
        error.__cause__ = KeyError(LONG)
    elif kind == "context":
        error.__context__ = KeyError(LONG)
    elif kind == "group":
        group = ExceptionGroup("short", [error, KeyError(LONG)])
        error.__context__ = group
        return group
    return error


@pytest.mark.parametrize("kind", ["message", "note", "cause", "context", "group"])
def test_of_long_texts_the_middle_is_left_out_and_the_type_stays(kind: str) -> None:
    original = causes(kind)
    failure = capture(original, pid=12)
    assert len(pickle.dumps(failure)) < 1_000_000
    error = travel(failure)
    cause = worker_error_of(error)
    assert "characters left out" in "".join(traceback.format_exception(error))
    assert "in capture" in str(cause)
    if kind != "group":
        assert type(error) is ValueError
        assert str(error).startswith("a line" if kind == "message" else "short")


def test_a_large_exception_that_is_no_text_arrives_as_text() -> None:
    failure = capture(ValueError("large", bytes(17 << 20)))
    assert len(pickle.dumps(failure)) < 1_000_000
    error = travel(failure)
    assert type(error) is WorkerError
    assert "ValueError: ('large'" in str(error)


def test_attributes_of_a_long_exception_stay() -> None:
    original: Any = OSError(28, LONG, "file")
    original.extra = [1, 2]
    error = travel(capture(original))
    assert isinstance(error, OSError)
    assert type(error) is OSError
    assert (error.errno, vars(error)["extra"]) == (28, [1, 2])


def test_a_warning_reaches_code_that_exec_runs_without_a_name() -> None:
    with pytest.warns(UserWarning, match="said"):
        exec("warn('said')", {"warn": warn})


class Holder:
    """Has an attribute, and a method to send."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def build(self) -> Any:
        return self.held


def unpicklables() -> dict[str, Any]:
    """Return what holds a lock, by what should be said of it."""
    lock = threading.Lock()

    def nested() -> Any:
        return lock

    def by_default(held: Any = lock) -> Any:
        return held

    space: dict[str, Any] = {"shared": lock, "__name__": "__main__"}
    exec("def reads():\n    return shared", space)
    here = r"unpicklables\.<locals>\."
    return {
        rf"variable 'lock' of {here}<lambda> \(.*test_errors\.py, line \d+\)": (
            lambda: lock
        ),
        rf"variable 'lock' of {here}nested \(.*": lambda: [nested],
        rf"default of 'held' of {here}by_default \(.*": by_default,
        r"global 'shared' of reads \(.*": space["reads"],
        r"argument 1 of partial": partial(print, 0, lock),
        r"argument 'file' of partial": partial(print, file=lock),
        rf"variable 'lock' of {here}nested \(.*, line .*": partial(print, nested),
        r"attribute 'held' of self of method": Holder(lock).build,
        r"attribute 'held' of item 'a' of item 1 of list": [0, {"a": Holder(lock)}],
        "lock": lock,
    }


@pytest.mark.parametrize("expected", unpicklables())
def test_what_cannot_be_pickled_is_named(expected: str) -> None:
    assert re.fullmatch(expected, unpicklable(unpicklables()[expected]))
