"""Workers import torch's compiler only to compile; it then knows tensordict's marks."""

from pathlib import Path

import pytest
from support.scripts import run_python

WORKERS = """
import sys

from marl_collect import MultiSyncCollector
from marl_collect.models import make_policy
from workloads.counting import CountingEnv


class Env(CountingEnv):
    def close(self):
        print("torch._dynamo" in sys.modules, flush=True)
        super().close()


compiles = sys.argv[2] == "compiles"
options = {"compile_policy": {"backend": "eager"}} if compiles else {}
policy = make_policy(CountingEnv, num_cells=(8,))
with MultiSyncCollector(
    [Env] * 2,
    policy,
    frames_per_batch=20,
    start_method=sys.argv[1],
    **options,
) as collector:
    for _ in range(2):
        collector.next()
        collector.update_policy_weights_()
"""

COMPILED = """
import torch
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.models import make_policy


@torch.compile(backend="eager")
def many_operations(x):
    for operation in (
        *(torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.exp, torch.abs),
        *(torch.floor, torch.ceil, torch.neg, torch.sign, torch.round, torch.square),
    ):
        x = operation(x)
    return x


class Net(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.layer = nn.Linear(n_in, n_out)

    def forward(self, x):
        return self.layer(many_operations(x))


def net(n_in, n_out, n_agents, **_):
    return Net(n_in, n_out)


def build():
    return make_policy(CountingEnv, network=net)
"""

CALLS_COMPILED = """
import compiled
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector

with MultiSyncCollector(
    [CountingEnv] * 2, policy_factory=compiled.build, frames_per_batch=20
) as collector:
    collector.next()
"""

MARKS = """
import sys

from marl_collect.processes.late_compiler import import_compiler_late

if "late" in sys.argv:
    import_compiler_late()

import tensordict

print("torch._dynamo" in sys.modules)

import torch
from torch._dynamo.trace_rules import _allowed_callable_ids as allowed

functions = {**vars(torch._C._functorch), "_foreach_copy_": torch._foreach_copy_}
print(*sorted(name for name, f in functions.items() if id(f) in allowed))
print(*sorted(
    f"{module}.{name}"
    for module in list(sys.modules)
    if module.startswith("tensordict")
    for name, value in vars(sys.modules[module]).items()
    if "_dynamo_marked_constant" in getattr(value, "__dict__", {})
))
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_workers_import_no_compiler_to_act(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    process = run_python(script, start_method, "acts", interpreter=True)
    assert process.stdout.split() == ["False"] * 2, process.stderr


def test_workers_compile_a_policy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    process = run_python(script, "forkserver", "compiles", interpreter=True)
    assert process.stdout.split() == ["True"] * 2, process.stderr


def test_the_compiler_leaves_what_sees_operations_alone(tmp_path: Path) -> None:
    """Compiling it again for every operation, it warns of its limit."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    script = tmp_path / "script.py"
    script.write_text(CALLS_COMPILED)
    process = run_python(script, interpreter=True, check=True)
    assert "torch._dynamo" not in process.stderr


def test_the_compiler_knows_what_tensordict_has_marked() -> None:
    first, *expected = run_python(
        "-c", MARKS, interpreter=True, check=True
    ).stdout.splitlines()
    assert first == "True"
    late, *actual = run_python(
        "-c", MARKS, "late", interpreter=True, check=True
    ).stdout.splitlines()
    assert late == "False"
    assert "_add_batch_dim" in expected[0]
    assert "tensordict.utils._lock_warn" in expected[1]
    assert actual == expected
