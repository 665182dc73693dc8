"""Editors accept users' scripts: pyright in its standard mode, as Pylance uses it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EVERY_CLASS = """\
from marl_collect import (
    Collector, MultiAsyncCollector, MultiSyncCollector, ParallelEnv, SerialEnv, describe
)
from marl_collect.envs import PettingZooEnv
from marl_collect.models import make_policy

def make() -> PettingZooEnv:
    return PettingZooEnv("multiwalker_v9", n_walkers=3, shared_reward=False)

PettingZooEnv("own:Env", group_map={"even": [0, 2], "others": [(0, 1), "b"]})

policy = make_policy(describe(make))
envs = ParallelEnv(2, make)
envs = ParallelEnv(2, [make, make], serial_for_single=True, start_method="spawn")
print(envs.reset(), envs.rollout(5), SerialEnv(2, make).group_map)
for batch in Collector(lambda: ParallelEnv(2, make), policy, frames_per_batch=100):
    print(batch["next", "walker", "reward"].mean())
with MultiAsyncCollector([make] * 2, policy, frames_per_batch=100) as collector:
    print(next(iter(collector)))
    collector.update_policy_weights_(policy)
collector = MultiSyncCollector(
    [make] * 4, policy, frames_per_batch=100, max_frames_per_traj=50, total_frames=200
)
collector.shutdown()
"""
WRONG = """\
from marl_collect import Collector, ParallelEnv
from marl_collect.envs import PettingZooEnv

ParallelEnv(2, nothing=1)
ParallelEnv("two", print)
collector = Collector(print, frames_per_batch=10)
collector.nxt()
reveal_type(collector.next())
for batch in collector:
    reveal_type(batch)
PettingZooEnv("simple_v3").rest()
"""


def diagnose(folder: Path, scripts: dict[str, str]) -> dict[str, list[str]]:
    """Return what pyright says of each script."""
    pyright = Path(sys.executable).with_name("basedpyright")
    if not pyright.exists():
        pytest.skip("needs the extra dev")
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    process = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=350,
    )
    errors: dict[str, list[str]] = {name: [] for name in scripts}
    for found in json.loads(process.stdout)["generalDiagnostics"]:
        # It cannot be installed beside the others.
        if 'Import "benchmarl' not in found["message"]:
            errors[Path(found["file"]).stem].append(found["message"])
    return errors


@pytest.mark.timeout(400)  # It reads torch, tensordict and TorchRL.
def test_users_scripts_have_no_errors(tmp_path: Path) -> None:
    (readme,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scripts = {"readme": readme, "every_class": EVERY_CLASS}
    scripts |= {path.stem: path.read_text() for path in EXAMPLES}
    errors = diagnose(tmp_path, scripts | {"wrong": WRONG})
    assert {name: errors[name] for name in scripts} == {key: [] for key in scripts}
    text = " ".join(errors["wrong"])
    assert 'attribute "nxt" for class "Collector"' in text
    assert 'Type of "batch" is "TensorDict"' in text
    assert 'Type of "collector.next()" is "TensorDict | None"' in text
    assert 'attribute "rest" for class "PettingZooEnv"' in text
    assert 'No parameter named "nothing"' in text
    assert "Literal['two']" in text
