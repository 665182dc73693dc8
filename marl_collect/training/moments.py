"""``RunningMoments``: mean and standard deviation of all numbers so far."""

import math
from collections.abc import Mapping
from typing import final

from torch import Tensor


@final
class RunningMoments:
    """Mean and standard deviation of all numbers that were added.

    Source:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", COMPSTAT 1982.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # Sum of the squared deviations from the mean.

    def add(self, numbers: Tensor) -> None:
        """Add numbers of any shape."""
        count = numbers.numel()
        if not count:
            return
        numbers = numbers.double()
        mean = float(numbers.mean())
        squares = float((numbers - mean).square().sum())
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    @property
    def mean(self) -> float:
        """The mean; 0 without numbers."""
        return self._mean

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 if all numbers are equal."""
        return math.sqrt(self._squares / max(1, self._count)) or 1.0

    def standardise(self, numbers: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation."""
        return (numbers - self.mean) / self.deviation

    def state_dict(self) -> dict[str, float]:
        """Return the count, the mean and the sum of squared deviations."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a ``state_dict``."""
        self._count = int(state["count"])
        self._mean, self._squares = state["mean"], state["squares"]
