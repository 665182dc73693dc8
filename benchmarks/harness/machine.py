"""What a run ran on."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "marl-collect",
    "torch",
    "tensordict",
    "torchrl",
    "pettingzoo",
    "gymnasium",
    "pufferlib",
    "ray",
    "mpe2",
    "box2d",
    "dm-meltingpot",
    "dmlab2d",
    "numpy",
)


def machine() -> dict[str, Any]:
    """Describe processor, memory, load, Python, packages and the commit."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1
        ),
        "quota": _text("/sys/fs/cgroup/cpu.max"),
        "governor": _text(
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "not known"
        ),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": _commit(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, in this environment."""
    package_versions = {}
    for name in PACKAGES:
        try:
            package_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return package_versions


def pressure() -> float:
    """Return the share of the last ten seconds in which somebody waited for a CPU."""
    words = _text("/proc/pressure/cpu").split()
    values = [word.partition("=")[2] for word in words if word.startswith("avg10=")]
    return float(values[0]) if values else 0.0


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    return process.stdout.strip() or "not known"


def _text(path: str, otherwise: str = "") -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return otherwise


def _cpu_name() -> str:
    lines = _text("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()
