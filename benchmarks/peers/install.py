"""Makes the environment of PufferLib, with a deadline.

    python benchmarks/peers/install.py                     # into .peers/
    python benchmarks/peers/install.py --minutes 5

A failure is recorded with its reason in ``installed.json``. ``suite.py`` finds the
environment by that file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.installed import REPORT, folder, installed

NAME = "pufferlib"
# It imports psutil and filelock without asking for them; it is built here, with the
# numpy that it runs with, and needs no torch for stepping.
STEPS: tuple[tuple[str, ...], ...] = (
    ("setuptools<70", "wheel", "cython", "numpy<2", "psutil", "filelock"),
    (
        *("--no-build-isolation", "pufferlib==1.0.1", "numpy<2"),
        *("gymnasium==0.29.1", "pettingzoo==1.24.1"),
    ),
)
"""Arguments of ``pip install``, one call after the other."""
CHECK = "import pufferlib.vector, pufferlib.emulation, pettingzoo"
_VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps({name: m.version(name) "
    "for name in ('pufferlib', 'numpy', 'gymnasium', 'pettingzoo')}))"
)


def install(at: Path, seconds: float) -> dict[str, Any]:
    """Make the environment in a folder; return status, reason and versions."""
    end = time.monotonic() + seconds
    python = str(at / NAME / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--prefer-binary"]
    commands = [
        [sys.executable, "-m", "venv", str(at / NAME)],
        *([*pip, *step] for step in STEPS),
        [python, "-c", CHECK],
    ]
    path = os.pathsep.join([str(at / NAME / "bin"), os.environ.get("PATH", "")])
    for number, command in enumerate(commands):
        seconds_left = end - time.monotonic()
        print(
            f"step {number + 1} of {len(commands)}, {seconds_left:.0f} s left",
            flush=True,
        )
        failure = _run(command, seconds_left, os.environ | {"PATH": path})
        if failure:
            return {"status": "failed", "reason": failure, "versions": {}}
    process = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    )
    return {"status": "ok", "reason": "", "versions": json.loads(process.stdout)}


def _run(command: list[str], seconds: float, env: Mapping[str, str]) -> str:
    """Return why a command failed; nothing if it did not."""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired:
        return f"no end before the deadline: {' '.join(command[2:])}"
    if process.returncode == 0:
        return ""
    lines = [line for line in process.stderr.splitlines() if "is ignored" not in line]
    return " | ".join(line.strip() for line in lines[-6:])[-700:]


def main() -> None:
    """Install, and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, help="folder; .peers of the checkout")
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    at = folder(arguments.at)
    at.mkdir(parents=True, exist_ok=True)
    result = install(at, 60 * arguments.minutes)
    text = json.dumps(installed(at) | {NAME: result}, indent=1)
    (at / REPORT).write_text(text, encoding="utf-8")
    print(f"{NAME}: {result['status']} {result['reason']}")


if __name__ == "__main__":
    main()
