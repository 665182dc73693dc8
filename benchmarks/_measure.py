"""What benchmarks share: medians with intervals, and what they ran on."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_RESAMPLES = 2000
_PACKAGES = (
    "marl-collect",
    "torch",
    "tensordict",
    "torchrl",
    "pettingzoo",
    "box2d",
    "numpy",
)


@dataclass(frozen=True)
class Estimate:
    """A median, with the 95 % interval of its bootstrap."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the median of ``values``; the same values give the same interval."""
        generator = np.random.default_rng(0)
        picked = generator.choice(values, (_RESAMPLES, len(values)))
        low, high = np.quantile(np.median(picked, 1), [0.025, 0.975])
        return cls(statistics.median(values), float(low), float(high))

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 2
        low, high = (f"{value:,.{digits}f}" for value in (self.low, self.high))
        return f"{self.median:,.{digits}f} ({low} to {high})"


def machine() -> dict[str, Any]:
    """Describe processor, load, Python and the packages that matter."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()
