"""Which peers have an environment of their own, and why others have none."""

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "MARL_BENCHMARK_PEERS"
REPORT = "installed.json"


def folder(path: Path | None = None) -> Path:
    """Return the folder of the environments: ``.peers`` unless told otherwise."""
    return path or Path(os.environ.get(VARIABLE, ROOT / ".peers"))


def installed(peers_folder: Path | None = None) -> dict[str, Any]:
    """Return ``status``, ``reason`` and ``versions`` of each peer.

    It is empty if ``install.py`` has not been run.
    """
    path = folder(peers_folder) / REPORT
    report: dict[str, Any] = {}
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    return report


def pythons(peers_folder: Path | None = None) -> dict[str, Path]:
    """Return the interpreters of the environments that work, by peer."""
    # Not resolved: the link is what tells Python which environment it is in.
    return {
        name: (folder(peers_folder) / name / "bin" / "python").absolute()
        for name, peer in installed(peers_folder).items()
        if peer["status"] == "ok"
    }
