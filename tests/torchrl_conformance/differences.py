"""Where marl_collect and TorchRL behave differently: docs/torchrl_conformance.md.

A row of the page's table names a test of this folder that one implementation fails. The
test must fail with the exception named here; once it passes, the row is stale and the
test run fails.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest

PAGE: Final = Path(__file__).parents[2] / "docs" / "torchrl_conformance.md"
_ROW: Final = re.compile(
    r"^\| (?P<behaviour>.+) \| (?P<fails>marl_collect|torchrl) \| (?P<reason>.+) "
    r"\| `(?P<test>test_\S+)` \|$",
    re.MULTILINE,
)
Raises = type[BaseException] | tuple[type[BaseException], ...]
NO_ERROR: Final = pytest.fail.Exception
RAISES: Final[dict[str, Raises]] = {
    "test_numbers_in_infos_are_entries": KeyError,
    "test_deaths_need_a_mask": NO_ERROR,
    "test_the_world_is_seen_at_the_root": KeyError,
    "test_substrates_cannot_be_seeded": NO_ERROR,
    "test_batches_nest": TypeError,
    "test_actions_of_a_wrong_shape_are_errors[SerialEnv-torchrl]": NO_ERROR,
    "test_private_attributes_are_not_dispatched[ParallelEnv-torchrl]": NO_ERROR,
    "test_methods_are_called_in_every_environment": AttributeError,
    "test_attributes_of_attributes_are_reached[torchrl]": EOFError,
    "test_attributes_of_attributes_are_reached": AttributeError,
    "test_a_rollout_may_end_with_the_last_environment": KeyError,
    "test_policy_and_factory_together_are_a_type_error": NO_ERROR,
    "test_the_same_tensordict_may_be_returned": TypeError,
    "test_hooks_run_before_and_after_a_batch": TypeError,
    "test_long_trajectories_are_truncated": RuntimeError,
    "test_a_frame_has_the_version_of_its_policy": (AssertionError, TypeError),
    "test_statistics_may_be_by_worker": TypeError,
}
"""What these tests raise; the others raise an AssertionError."""
BELOW: Final = {
    "test_attributes_of_attributes_are_reached[torchrl]": "0.14",
    "test_long_trajectories_are_truncated": "0.14",
    "test_environments_may_be_reset_for_every_batch": "0.14",
    "test_a_reset_begins_new_trajectories": "0.14",
}
"""Tests that only TorchRL versions below this one fail."""


@dataclass(frozen=True)
class Difference:
    """One test that one implementation fails.

    Attributes:
        test: the test's name, without parameters or with them.
        fails: the implementation that does not behave as the test says.
        reason: what this implementation does, and why.
    """

    test: str
    fails: str
    reason: str

    @property
    def raises(self) -> Raises:
        """What the test raises."""
        return RAISES.get(self.test, AssertionError)

    def covers(self, test_id: str, implementation: str | None) -> bool:
        """Return whether a test item is expected to fail."""
        if implementation != self.fails:
            return False
        if self.test in BELOW and _installed() >= _release(BELOW[self.test]):
            return False
        return test_id == self.test or test_id.partition("[")[0] == self.test


DIFFERENCES: Final = [
    Difference(row["test"], row["fails"], row["reason"])
    for row in _ROW.finditer(PAGE.read_text(encoding="utf-8"))
]


@cache
def _installed() -> tuple[int, ...]:
    """Return the release of TorchRL, whose metadata takes milliseconds to read."""
    return _release(version("torchrl"))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
