"""What a user of an editor, a notebook or a shell expects: texts, types, completion."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from support.scripts import run_python
from workloads.counting import CountingEnv

import marl_collect
from marl_collect import (
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    RandomPolicy,
    RayCollector,
    SerialEnv,
    evaluate,
    open_dataset,
    record,
)
from marl_collect.models import make_policy
from marl_collect.storage import BackgroundWriter, Writer
from marl_collect.storage.recording import EpisodeWriter

pytestmark = pytest.mark.processes


OPTIONS = [Collector, MultiSyncCollector, MultiAsyncCollector, RayCollector]


@pytest.mark.parametrize("kind", [*OPTIONS, ParallelEnv, SerialEnv])
def test_signature_and_help_show_each_option_with_type_and_text(kind: Any) -> None:
    parameters = inspect.signature(kind).parameters.values()
    assert len(parameters) >= 3
    text = inspect.getdoc(kind.__init__) or ""
    for parameter in parameters:
        assert parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ), parameter
        assert parameter.annotation is not parameter.empty, parameter
        (line,) = [
            x for x in text.splitlines() if x.strip().startswith(f"{parameter.name}: ")
        ]
        assert len(line.split()) >= 2


def things(folder: Path, stack: ExitStack) -> Iterator[Any]:
    """Yield one object of each public class that users hold; see the test."""
    policy = make_policy(CountingEnv)
    yield RandomPolicy()
    yield RandomPolicy(CountingEnv().description)
    yield RandomPolicy(spaces.Discrete(3))
    yield CountingEnv()
    yield CountingEnv().description
    yield stack.enter_context(SerialEnv(2, CountingEnv))
    yield stack.enter_context(ParallelEnv(2, CountingEnv))
    yield stack.enter_context(Collector(CountingEnv, frames_per_batch=10))
    yield stack.enter_context(Evaluator(policy, CountingEnv, num_workers=1))
    yield evaluate(policy, CountingEnv, episodes=2, num_workers=1)
    dataset = record(folder, CountingEnv, episodes=2, num_workers=1)
    yield dataset
    yield dataset.trajectories
    yield dataset.transitions
    yield dataset.transitions.loader(batch_size=2)
    about = dataset.description
    writer = Writer(folder.with_name("more"), about)
    yield writer
    episode_writer = EpisodeWriter(writer, 2)
    yield episode_writer
    yield stack.enter_context(BackgroundWriter(episode_writer))
    yield open_dataset(folder).trajectories.filter(lambda episode: episode.length > 0)


def test_reprs_are_one_line(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for instance in things(tmp_path / "data", stack):
            text = repr(instance)
            name = type(instance).__name__
            assert name in text or "Env" in text, name
            assert "\n" not in text, text
            assert " object at 0x" not in text, text


def test_the_version_is_that_of_the_command() -> None:
    command = Path(sys.executable).with_name("marl-collect")  # As it is installed.
    process = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"marl-collect {marl_collect.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("marl-collect ", {"collect", "compare", "play", "render", "inspect", "info"}),
        ("marl-collect collect --wor", {"--workers"}),
        ("marl-collect compare --se", {"--setup", "--seeds", "--set", "--settings"}),
    ],
)
def test_the_shell_completes_commands_and_options(
    typed: str, expected: set[str]
) -> None:
    variables = {
        "_MARL_COLLECT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    code = "from marl_collect.cli.main import app; app(prog_name='marl-collect')"
    process = run_python("-c", code, env=os.environ | variables, check=True)
    assert expected <= set(process.stdout.split())


def test_the_script_of_the_completion_can_be_printed() -> None:
    code = "from marl_collect.cli.main import app; app(prog_name='marl-collect')"
    # The command looks for the shell that started it. The second command of this one
    # keeps the shell from being replaced by the first.
    line = '"$0" -c "$1" --show-completion; exit $?'
    process = subprocess.run(
        ["bash", "-c", line, sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_MARL_COLLECT_COMPLETE=complete_bash" in process.stdout, process.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda: MultiSyncCollector([CountingEnv] * 2, frames_per_batch=3),
        lambda: Collector([CountingEnv] * 2, frames_per_batch=3),
    ],
)
def test_a_warning_points_to_the_line_of_the_user(call: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="is rounded up") as warning_record:
        call().shutdown()
    assert warning_record[0].filename == __file__
    assert warning_record[0].lineno == call.__code__.co_firstlineno


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
