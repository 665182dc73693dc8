"""Griffe extension of the reference: prepares docstrings and signatures for MkDocs.

Constructors and functions whose arguments are declared as options
(``marl_collect.options``) have one argument in the source. They get the real signature,
and a link to the page of all options. Tables in docstrings are written for the
terminal, with lines of ``=``. They are shown as text of fixed width.
"""

import importlib
import inspect
import re
from enum import Enum
from typing import Any

import griffe

_TABLE = re.compile(
    r"^( *)(=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+)$",
    re.MULTILINE,
)
"""A table: a line of ``=``, the head, a line, the body, a line; all with one indent."""
_DECLARED = re.compile(r"^(?:method|function)\(\w+\)$")
_LINK = "[All options](../options.md) describes the arguments."


class ApiPages(griffe.Extension):
    """Changes what the reference shows of functions and docstrings."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Give a function the arguments that its options declare."""
        for decorator in func.decorators:
            if _DECLARED.match(str(decorator.value)):
                _set_parameters(func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Show the tables of a docstring as they are written."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _TABLE.sub(r"\1```text\n\1\2\n\1```", text)


def _set_parameters(func: griffe.Function) -> None:
    """Give a function the names and defaults that it has at run time."""
    target: Any = importlib.import_module(func.module.path)
    for name in func.path.removeprefix(func.module.path + ".").split("."):
        target = getattr(target, name)
    func.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                parameter.name,
                kind=griffe.ParameterKind(parameter.kind.description),
                default=_text(parameter.default),
            )
            for parameter in inspect.signature(target).parameters.values()
        )
    )
    if func.docstring is not None:
        func.docstring.value += f"\n\n{_LINK}"


def _text(default: Any) -> str | None:
    if default is inspect.Parameter.empty:
        return None
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    return repr(default)
