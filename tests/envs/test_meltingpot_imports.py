"""Building a substrate leaves no trace of MeltingPot in ``sys.modules``.

Each test runs in its own process, because imports are what is tested.
"""

import importlib.util
import sys
import textwrap
from typing import Any

import pytest
from support.scripts import run_python

from marl_collect.envs.meltingpot import imports as meltingpot_imports

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
]  # One of them imports TensorFlow.

needs_meltingpot = pytest.mark.skipif(
    importlib.util.find_spec("meltingpot") is None, reason="needs dm-meltingpot"
)


def run(source: Any) -> Any:
    """Run ``source`` in a fresh interpreter and return what it printed."""
    out = run_python("-c", textwrap.dedent(source), interpreter=True, timeout=500.0)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


PLAY = """
from marl_collect.core.description import allocate
from marl_collect.envs import MeltingpotEnv
def play():
    env = MeltingpotEnv("collaborative_cooking__cramped", observations=["RGB"])
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(1)
    env.step_row()
    assert row["agents", "observation", "RGB"].any()
    env.close()
"""


@needs_meltingpot
def test_a_substrate_loads_no_tensorflow_and_a_later_import_is_complete() -> None:
    run(
        PLAY
        + """
import importlib.util, sys, tempfile
play()
def loaded(*packages):
    return sorted(m for m in sys.modules if m.partition(".")[0] in packages)
assert not loaded("tensorflow", "jax", "chex", "meltingpot", "pandas", "torch")
play()
assert not loaded("meltingpot")

import meltingpot
assert meltingpot.__file__ and meltingpot.__spec__.loader
for name in ("bot", "scenario", "substrate"):
    assert getattr(meltingpot, name).__name__ == "meltingpot." + name
assert sys.modules["meltingpot.python"] is meltingpot
import meltingpot.configs.substrates.coins
import meltingpot.utils.substrates.builder as builder
assert builder is sys.modules["meltingpot.utils.substrates.builder"]
assert builder is meltingpot.utils.substrates.builder
roles = ("default",) * 2
env = meltingpot.substrate.build("collaborative_cooking__cramped", roles=roles)
assert type(env) is meltingpot.utils.substrates.substrate.Substrate
env.reset()
env.close()
whole = loaded("meltingpot")

import tensorflow as tf
assert tf.__file__
assert int(tf.constant(1) + 1) == 2
if importlib.util.find_spec("tensorboard"):
    from torch.utils.tensorboard import SummaryWriter
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("a", 1.0, 0)
play()
assert loaded("meltingpot") == whole
assert sys.modules["meltingpot"] is meltingpot
"""
    )


@needs_meltingpot
def test_an_error_inside_leaves_no_modules_behind() -> None:
    run(
        """
import sys
from marl_collect.envs.meltingpot import imports as meltingpot_imports
try:
    with meltingpot_imports.meltingpot_modules():
        from meltingpot.configs import substrates
        raise KeyError
except KeyError:
    pass
assert not [name for name in sys.modules if name.startswith("meltingpot")]
first = substrates
with meltingpot_imports.meltingpot_modules():
    with meltingpot_imports.meltingpot_modules():
        from meltingpot.configs import substrates
    from meltingpot.utils.substrates import builder
assert substrates is first
assert not [name for name in sys.modules if name.startswith("meltingpot")]
"""
    )


def test_without_meltingpot_errors_have_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "meltingpot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for use in (
        meltingpot_imports.import_meltingpot,
        meltingpot_imports.meltingpot_modules().__enter__,
    ):
        with pytest.raises(ImportError) as error:
            use()
        assert "marl-collect[meltingpot]" in str(error.value)
        assert "scripts/install_meltingpot.py" in str(error.value)
