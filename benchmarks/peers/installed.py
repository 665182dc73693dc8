"""Which peers have an environment of their own, and why others have none."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "MARL_BENCHMARK_PEERS"
REPORT = "installed.json"


@final
@dataclass(frozen=True)
class Installed:
    """What ``install.py`` left.

    Attributes:
        pythons: interpreters of the environments that work.
        report: per peer ``status``, ``reason`` and ``versions``.
    """

    pythons: dict[str, Path] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return what a reader of the results needs."""
        return self.report


def folder(path: Path | None = None) -> Path:
    """Return the folder of the environments: ``.peers`` unless told otherwise."""
    return path or Path(os.environ.get(VARIABLE, ROOT / ".peers"))


def installed(peers_folder: Path | None = None) -> Installed:
    """Return what is installed; nothing if ``install.py`` has not been run."""
    path = folder(peers_folder) / REPORT
    if not path.exists():
        return Installed()
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # Not resolved: the link is what tells Python which environment it is in.
    pythons = {
        name: (path.parent / name / "bin" / "python").absolute()
        for name, peer in report.items()
        if peer["status"] == "ok"
    }
    return Installed(pythons, report)
