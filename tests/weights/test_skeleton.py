"""What workers unpickle does not refer to the user's script."""

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

FORMAT = """
import sys

# As where a script imports tensordict before torch.
modules = dict(sys.modules)
sys.modules.clear()
sys.modules["__mp_main__"] = sys.modules["__main__"] = modules.pop("__main__")
sys.modules.update(modules | {"__mp_main__": sys.modules["__main__"]})

import torch
from torch import nn

from marl_collect.weights.skeleton import assemble_module, split_module, weight_tensors

module = nn.Linear(2, 2)
module.format = torch.channels_last  # Layers of images have one.
skeleton = split_module(module)
assert b"__mp_main__" not in skeleton.module, skeleton.module
copy = assemble_module(skeleton, list(weight_tensors(module).values()))
assert copy.format is torch.channels_last
"""


def test_a_memory_format_is_not_looked_up_in_the_script() -> None:
    process = run_python("-c", FORMAT)
    assert process.returncode == 0, process.stderr
