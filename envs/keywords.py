"""From the keywords of a constructor to the options that it takes along."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

OptionsT = TypeVar("OptionsT")


def options_of(kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Return the dataclass ``kind`` with its fields as they stand in ``given``.

    Constructors spell their keywords out, for readers and type checkers, and pass
    ``locals()`` on: a keyword that a field lacks is a ``KeyError`` at the first call.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names})
