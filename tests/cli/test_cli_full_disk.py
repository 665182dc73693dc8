"""On a full disk, errors name the file and its folder, and say what to do."""

import json
import re
from pathlib import Path

import pytest
from support.datasets import record_here
from support.scripts import run_mounted, run_python
from workloads.counting import CountingEnv, CountingOptions

pytestmark = pytest.mark.processes

PROGRAM = """
import json, shutil, sys
from pathlib import Path

import torch
from typer.testing import CliRunner

from marl_collect.cli.main import app
from marl_collect.files.log_file import add_line
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import RunFolder
from workloads.counting import CountingEnv, CountingOptions

IMAGES = CountingOptions(image=(40, 44, 3))


def command(*arguments):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code, result.output
    if not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def record():
    from support.datasets import record_here
    record_here(SMALL / "new", lambda: CountingEnv(IMAGES), episodes=200)


def checkpoint():
    Checkpoint(SMALL / "run", {"w": {"w": torch.rand(10**6)}}).save()


def row():
    run = RunFolder(SMALL / "run")
    while True:
        run.add_row({f"column_{i}": 0.123456789 for i in range(100)})


def log():
    while True:
        add_line(SMALL / "run" / "progress.log", "x" * 9_000)


ACTIONS = {
    "record": record,
    "Checkpoint": checkpoint,
    "compare": lambda: RunFolder(SMALL / "run").write_json("random.json", ["x" * 9**7]),
    "progress.csv": row,
    "progress.log": log,
    "copy": lambda: command("copy", "data", str(SMALL / "copied")),
    "view --save": lambda: command("view", "data", "--save", str(SMALL / "x.html")),
}
SMALL = Path("small").absolute()
sys.path.append(sys.argv[1])


def fill():
    with (SMALL / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            filler.truncate(filler.tell() - 8 * 4096)


told = {}
for name, action in ACTIONS.items():
    fill()
    try:
        text = action()
    except OSError as error:
        text = str(error)
    told[name] = text, [str(p) for p in SMALL.rglob(".*")]
    for path in SMALL.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
Path("told.json").write_text(json.dumps(told))
"""
PATHS = {
    "record": r"new/\S+\.parquet",
    "Checkpoint": r"run/checkpoints/last\.pt",
    "compare": r"run/random\.json",
    "progress.csv": r"run/progress\.csv",
    "progress.log": r"run/progress\.log",
    "copy": r"copied/\S+\.parquet",
    "view --save": r"x\.html",
}


@pytest.mark.mounts
def test_each_error_on_a_full_disk_names_its_file_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    options = CountingOptions(image=(40, 44, 3))
    record_here(tmp_path / "data", lambda: CountingEnv(options), episodes=200)
    (tmp_path / "small").mkdir()
    tests = str(Path(__file__).parents[1])
    process = run_mounted("small", PROGRAM, tests, mebibytes=1, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    errors = json.loads((tmp_path / "told.json").read_text())
    assert errors.keys() == PATHS.keys()
    small = re.escape(str(tmp_path / "small"))
    for action, (text, left) in errors.items():
        assert re.search(
            r"\[Errno 28\] No space left on device\. Free some space for "
            rf"{small}\S*, or write to another folder: '{small}/{PATHS[action]}'",
            text,
        ), (action, text)
        assert left == [], action


LIMITED = """
import resource, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from pathlib import Path
from marl_collect.files.atomic import write_atomically
try:
    write_atomically(Path("file"), b"x" * 20_000)
except OSError as error:
    print(error)
print(list(Path().iterdir()))
"""


def test_a_limit_of_the_process_is_named(tmp_path: Path) -> None:
    result = run_python("-c", LIMITED, cwd=tmp_path, check=True)
    assert result.stdout == (
        "[Errno 27] File too large. Raise the limit of this process (ulimit -f): "
        "'file'\n[]\n"
    )
