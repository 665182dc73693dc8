"""Descriptions of a dataset and of each run that wrote to it."""

import functools
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Self, final

from marl_collect.core.description import EnvDescription
from marl_collect.core.seeding import checked_seed
from marl_collect.errors import DatasetError
from marl_collect.files.description_json import (
    environment_from_json,
    environment_to_json,
)
from marl_collect.programs.task_providers import packages

_PACKAGES = ("marl-collect", "torch", "tensordict", "numpy", "gymnasium")
"""The packages of the engine that determine the data."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that determine the data.

    Environment families add their own packages; see ``TaskProvider``.
    """
    versions = {"python": platform.python_version()}
    for name in (*_PACKAGES, *packages()):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = _version(name, tuple(sys.path))
    return versions


@functools.cache
def _version(name: str, _path: tuple[str, ...]) -> str:
    # It is read from a file and parsed. `_path` is where it was found, for the cache.
    return importlib.metadata.version(name)


@final
@dataclass(frozen=True)
class DatasetDescription:
    """Describes what all batches of a dataset have in common.

    Attributes:
        task: name of the environment, such as ``"multiwalker_v9"``.
        environment: groups and spaces.
        env_kwargs: keyword arguments of the environment, as JSON values.
    """

    task: str
    environment: EnvDescription
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        environment = environment_to_json(self.environment)
        about = {"task": self.task, "env_kwargs": dict(self.env_kwargs)}
        # As they are read, with lists instead of tuples.
        values: dict[str, Any] = json.loads(
            json.dumps(about | {"environment": environment})
        )
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the description from the output of ``to_json``."""
        environment = environment_from_json(data["environment"])
        return cls(_typed(data, "task", str), environment, _typed(data, "env_kwargs"))


@final
@dataclass(frozen=True)
class RunDescription:
    """Describes one run of a writer; a dataset can have several runs.

    Attributes:
        seed: of the collector.
        policy: the policy that acted, as JSON values.
        options: further settings, such as the number of workers.
        versions: of Python and of the packages that determine the data.
        started: UTC time in ISO 8601.
    """

    seed: int | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def __post_init__(self) -> None:
        """Raise a TypeError or a ValueError if the seed is none."""
        if self.seed is not None:
            checked_seed(self.seed)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the description from the output of ``to_json``."""
        names = ("policy", "options", "versions")
        policy, options, versions = (_typed(data, name) for name in names)
        started = _typed(data, "started", str)
        return cls(data["seed"], policy, options, versions, started)


def _typed(data: Mapping[str, Any], name: str, kind: type = dict) -> Any:
    value = data[name]
    if type(value) is not kind:
        raise DatasetError(f"{name} is {value!r}, which is of another type.")
    return value


def difference(there: Any, here: Any, where: str = "") -> str:
    """Say how JSON values ``here`` differ from those of a dataset; empty if not."""
    if there == here:
        return ""
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return f"{where} is {here!r}, but {there!r} in the dataset"
    for name in {**there, **here}:
        before, now = (values.get(name, "missing") for values in (there, here))
        text = difference(before, now, f"{where}/{name}".lstrip("/"))
        if text:
            return text
    return ""
