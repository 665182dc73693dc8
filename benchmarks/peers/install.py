"""Makes an environment for each peer that needs one of its own, with a deadline.

    python benchmarks/peers/install.py                     # all, into .peers/
    python benchmarks/peers/install.py --minutes 5

A failure ends nothing: it is recorded with its reason in ``installed.json``, and the
report shows it. ``suite.py`` finds the environments by that file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.installed import REPORT, folder, installed

_VERSIONS = (
    "import importlib.metadata as m, json, sys; "
    "print(json.dumps({d.metadata['Name'].lower(): d.version "
    "for d in m.distributions() if d.metadata['Name']}))"
)


@final
@dataclass(frozen=True)
class Peer:
    """What an environment needs.

    Attributes:
        steps: arguments of ``pip install``, one call after the other.
        check: imports that show that it works.
        shown: packages whose versions are recorded.
    """

    steps: tuple[tuple[str, ...], ...]
    check: str
    shown: tuple[str, ...]


PEERS = {
    # It imports psutil and filelock without asking for them; it is built here, with the
    # numpy that it runs with, and needs no torch for stepping.
    "pufferlib": Peer(
        (
            ("setuptools<70", "wheel", "cython", "numpy<2", "psutil", "filelock"),
            (
                "--no-build-isolation",
                "pufferlib==1.0.1",
                "numpy<2",
                "gymnasium==0.29.1",
                "pettingzoo==1.24.1",
            ),
        ),
        "import pufferlib.vector, pufferlib.emulation, pettingzoo",
        ("pufferlib", "numpy", "gymnasium", "pettingzoo"),
    ),
}


def install(name: str, peer: Peer, at: Path, seconds: float) -> dict[str, Any]:
    """Make one environment; return status, reason and versions."""
    end = time.monotonic() + seconds
    python = str(at / name / "bin" / "python")
    commands = [[sys.executable, "-m", "venv", str(at / name)]]
    pip = [python, "-m", "pip", "install", "--quiet", "--prefer-binary"]
    commands += [[*pip, *step] for step in peer.steps]
    commands.append([python, "-c", peer.check])
    path = os.pathsep.join([str(at / name / "bin"), os.environ.get("PATH", "")])
    for number, command in enumerate(commands):
        seconds_left = end - time.monotonic()
        print(
            f"  step {number + 1} of {len(commands)}, {seconds_left:.0f} s left",
            flush=True,
        )
        failure = _run(command, seconds_left, os.environ | {"PATH": path})
        if failure:
            return {"status": "failed", "reason": failure, "versions": {}}
    process = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    )
    installed_versions = json.loads(process.stdout)
    versions = {
        package: installed_versions[package]
        for package in peer.shown
        if package in installed_versions
    }
    return {"status": "ok", "reason": "", "versions": versions}


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
    parser.add_argument("--minutes", type=float, default=10.0, help="for each")
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=PEERS)
    arguments = parser.parse_args()
    at = folder(arguments.at)
    at.mkdir(parents=True, exist_ok=True)
    path, report = at / REPORT, installed(at)
    for number, name in enumerate(arguments.only):
        print(f"{number + 1} of {len(arguments.only)}: {name}", flush=True)
        report[name] = install(name, PEERS[name], at, 60 * arguments.minutes)
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(f"{name}: {report[name]['status']} {report[name]['reason']}", flush=True)


if __name__ == "__main__":
    main()
