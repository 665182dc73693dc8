"""The warm-up in the fork server loads all modules and leaves no thread running."""

import os
import subprocess
import sys

from marl_collect.processes.launcher import without_arrow_thread

SCRIPT = """
import os, sys
import marl_collect.collectors.warm_up
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive a fork"
loaded = set(sys.modules)
policy = TensorDictModule(torch.nn.Linear(2, 3), ["observation"], ["action"])
policy(TensorDict({"observation": torch.zeros(4, 2)}, [4]))
late = sorted(set(sys.modules) - loaded)
assert not late, late
"""


def test_workers_inherit_all_modules_that_a_policy_needs() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1", **without_arrow_thread()},
    )
    assert process.returncode == 0, process.stderr
