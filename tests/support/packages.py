"""Skips tests whose packages are missing, without importing these."""

import importlib.util

import pytest


def skip_without(package: str, reason: str) -> None:
    """Skip the test without ``package``, which ``pytest.importorskip`` would import.

    For meltingpot, that import costs 4 s. It includes TensorFlow, whose libraries fill
    the addresses near dmlab2d. LuaJIT needs free ones there for machine code; without
    any, it interprets, and substrates start ten times as slowly.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason)
