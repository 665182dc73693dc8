"""What a run was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

WHOLE_GRID_MINUTES = 60.0


@final
@dataclass(frozen=True)
class Settings:
    """What a run was asked for.

    Attributes:
        minutes: that the whole run may take.
        workers: of collectors; loops run in as many processes at once.
        pythons: the interpreter of each peer that has an environment of its own.
        spins_per_us: of the burning environment, on this machine.
        only: run what begins with one of these; everything if empty.
    """

    minutes: float = 35.0
    workers: int = 2
    pythons: Mapping[str, Path] = field(default_factory=dict)
    spins_per_us: float = 20.0
    only: tuple[str, ...] = ()

    @property
    def quick(self) -> bool:
        """Whether there is time only for what targets are about."""
        return self.minutes < 15

    @property
    def whole(self) -> bool:
        """Whether there is time for every point of every curve."""
        return self.minutes >= WHOLE_GRID_MINUTES

    @property
    def headline_rounds(self) -> int:
        """Windows of each system in the rows that targets are about."""
        return 3 if self.quick else 10

    @property
    def rounds(self) -> int:
        """Windows of each system elsewhere."""
        return 2 if self.quick else 5 if self.whole else 3
