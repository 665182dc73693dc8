"""Packages that are missing, or seem to be: none of them is imported."""

import importlib.util
from typing import Any

import pytest


def skip_without(package: str, reason: str) -> None:
    """Skip the test without ``package``, which ``pytest.importorskip`` would import.

    For meltingpot, that import costs 4 s. It includes TensorFlow, whose libraries fill
    the addresses near dmlab2d. LuaJIT needs free ones there for machine code; without
    any, it interprets, and substrates start ten times as slowly.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason)


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make ``find_spec`` not find packages."""
    find = importlib.util.find_spec

    def found(name: str, *arguments: Any) -> Any:
        return None if name.partition(".")[0] in packages else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", found)
