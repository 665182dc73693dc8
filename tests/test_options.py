"""An option is declared once; keywords, checks, help and refusals follow from it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from support.scripts import run_python

from marl_collect.options import (
    Option,
    Options,
    RejectedKeyword,
    changed,
    declared,
    did_you_mean,
    function,
    method,
    nearest,
    only,
    refuse,
    require,
    values,
)

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Base(Options):
    """What others add to."""

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = {
        "old": RejectedKeyword("use count", only(None, True))
    }
    seconds: Annotated[
        float | None, Option("to wait", positive=True, at_most=100, unit="seconds")
    ] = 3.0


@dataclass(frozen=True, kw_only=True)
class Own(Base):
    """All kinds of types."""

    count: Annotated[int | Sequence[int], Option("how many", at_least=1, at_most=9)]
    limit: Annotated[int | None, Option("most", at_least=1, off=(0, -1))] = None
    switch: Annotated[bool, Option("on", off=(None,), not_in={"Here": "it is off"})] = (
        False
    )
    choice: Annotated[Literal["a", "b", 0] | None, Option("one", hint="Read.")] = None
    names: Annotated[Sequence[str], Option("names")] = ()
    call: Annotated[Callable[[], Any] | None, Option("called")] = None
    extra: Annotated[bool | Mapping[str, Any], Option("more")] = False


@dataclass(frozen=True)
class Arguments(Own):
    """The arguments of Thing."""

    first: Annotated[Any, Option("the first", checked=False)]
    second: Any = None
    _: KW_ONLY
    last: Annotated[str | None, Option("the last")] = None


class Thing:
    """Has options."""

    @method(Arguments)
    def __init__(self, options: Arguments) -> None:
        """Keep them."""
        self.options = options


@function(Arguments)
def thing(options: Arguments) -> Arguments:
    """Return them."""
    return options


@pytest.mark.parametrize("make", [lambda *a, **k: Thing(*a, **k).options, thing])
def test_arguments_reach_the_options(make: Any) -> None:
    arguments = make(1, 2, count=np.int64(3), seconds=np.float32(2), switch=np.True_)
    assert arguments == Arguments(first=1, second=2, count=3, seconds=2.0, switch=True)
    assert [type(arguments.count), type(arguments.seconds), type(arguments.switch)] == [
        int,
        float,
        bool,
    ]
    assert make(count=[np.int32(1), 2], first=1).count == [1, 2]


def test_signature_is_the_user_s() -> None:
    parameters = inspect.signature(Thing).parameters
    assert list(parameters)[:5] == ["first", "second", "count", "last", "limit"]
    assert list(parameters)[-1] == "seconds"
    assert parameters["count"].default is inspect.Parameter.empty
    assert parameters["seconds"].default == 3.0
    assert parameters["count"].annotation == int | Sequence[int]
    assert Thing.__init__.__annotations__["count"] == int | Sequence[int]
    assert inspect.signature(thing).return_annotation is Arguments
    assert "limit: most." in inspect.getdoc(Thing.__init__)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({}, TypeError, r"count must be given: how many\."),
        ({"coutn": 1}, TypeError, "Thing has no argument 'coutn'. Did you mean count"),
        ({"count": 1, "old": 3}, TypeError, "Thing takes no old: use count"),
        ({"count": True}, TypeError, "an integer .* or a sequence of integers"),
        ({"count": 2.0}, TypeError, "count must be an integer of at least 1"),
        ({"count": 0}, ValueError, r"must be an integer of at least 1, but is 0\."),
        ({"count": 10**18}, ValueError, "must be an integer of at most 9, but is 1000"),
        ({"count": [1, 0]}, ValueError, "a sequence of integers of at least 1, but is"),
        ({"count": [1, "2"]}, TypeError, "count must be"),
        ({"count": 1, "seconds": "a"}, TypeError, "a positive number of seconds"),
        ({"count": 1, "seconds": float("inf")}, TypeError, "a positive number"),
        ({"count": 1, "seconds": float("nan")}, TypeError, "a positive number"),
        ({"count": 1, "seconds": 0}, ValueError, "positive number of seconds or None"),
        ({"count": 1, "seconds": 101}, ValueError, "seconds of at most 100 or None"),
        ({"count": 1, "limit": -2}, ValueError, "limit must be"),
        ({"count": 1, "switch": "yes"}, TypeError, "switch must be True or False"),
        ({"count": 1, "switch": 1}, TypeError, "switch must be True or False"),
        ({"count": 1, "choice": "c"}, ValueError, "one of 'a', 'b', 0, None, .* Read"),
        ({"count": 1, "choice": False}, ValueError, "one of 'a', 'b', 0, None"),
        ({"count": 1, "names": "os"}, TypeError, "a sequence of strings"),
        ({"count": 1, "names": [1]}, TypeError, "a sequence of strings"),
        ({"count": 1, "call": 3}, TypeError, "callable or None"),
        ({"count": 1, "extra": 3}, TypeError, "True or False or a mapping"),
        ({"count": 1, "extra": {1: 2}}, TypeError, "a mapping with strings as keys"),
    ],
)
def test_what_is_wrong_is_refused(
    keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Thing(1, **keywords)


def test_values_that_mean_off_become_the_default() -> None:
    for off in (0, -1, np.int64(-1), None):
        assert thing(1, count=1, limit=off).limit is None  # type: ignore[arg-type]
    assert thing(1, count=1, switch=None).switch is False  # type: ignore[arg-type]


def test_harmless_values_of_rejected_keywords_are_accepted() -> None:
    assert thing(1, count=1, old=True) == thing(1, count=1)  # type: ignore[call-arg]


def test_options_without_a_place_are_refused_unless_left_alone() -> None:
    refuse(thing(1, count=1, switch=False), "Here")
    refuse(thing(1, count=1, switch=True), "There")
    with pytest.raises(TypeError, match="Here takes no switch: it is off"):
        refuse(thing(1, count=1, switch=True), "Here")


def test_values_of_a_part() -> None:
    instance = thing(1, count=1, seconds=2, limit=3)
    assert values(Base, instance) == {"seconds": 2.0}
    assert changed(Own, instance) == {"seconds": 2.0, "count": 1, "limit": 3}
    assert [option.name for option in declared(Base)] == ["seconds"]


def test_single_arguments_are_checked_alike() -> None:
    assert require("n", np.int64(2), int, Option("", at_least=1)) == 2
    with pytest.raises(ValueError, match="n must be an integer of at least 1"):
        require("n", 0, int, Option("", at_least=1))
    with pytest.raises(TypeError, match="a string or a sequence of strings or Paths"):
        require("path", 3, str | Sequence[str | Path], Option(""))


@pytest.mark.processes
def test_tables_of_the_documentation_are_those_of_the_code() -> None:
    script = ROOT / "scripts" / "option_tables.py"
    process = run_python(script, "--check")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["coins", "corns", "chess"], " Did you mean coins or corns?"),
        ({"coins": "meltingpot/coins"}, " Did you mean meltingpot/coins?"),
        (["chess"], ""),
    ],
)
def test_errors_suggest_names_that_are_spelled_alike(names: Any, expected: str) -> None:
    assert did_you_mean(nearest("coin", names)) == expected
