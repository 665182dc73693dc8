"""What a dataset says about itself: the same for all of it, and for each run."""

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self, final

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.storage.spaces import space_from_json, space_to_json

_PACKAGES = (
    "marl-collect",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "pettingzoo",
    "mpe2",
    "box2d",
    "pymunk",
    "multi-agent-ale-py",
    "dm-meltingpot",
    "dmlab2d",
)
"""What determines experience: ourselves, arithmetic, and environments."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that determine experience."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@final
@dataclass(frozen=True)
class DatasetDescription:
    """What all batches of a dataset have in common.

    Attributes:
        task: name by which the environment is found, such as ``"multiwalker_v9"``.
        environment: groups and spaces.
        env_kwargs: what the environment was built with; values that JSON knows.
    """

    task: str
    environment: EnvDescription
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "task": self.task,
            "env_kwargs": dict(self.env_kwargs),
            "environment": environment_to_json(self.environment),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the description that ``data`` was made of."""
        environment = environment_from_json(data["environment"])
        return cls(data["task"], environment, data["env_kwargs"])


@final
@dataclass(frozen=True)
class RunDescription:
    """What one writing process adds: a dataset that is appended to has several.

    Attributes:
        seed: of the collector.
        policy: what acted; values that JSON knows.
        options: further settings, such as the number of workers.
        versions: of Python and of the packages that determine experience.
        started: time, UTC, in ISO 8601.
    """

    seed: int | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "seed": self.seed,
            "policy": dict(self.policy),
            "options": dict(self.options),
            "versions": dict(self.versions),
            "started": self.started,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the description that ``data`` was made of."""
        known = ("seed", "policy", "options", "versions", "started")
        return cls(**{name: data[name] for name in known})


def environment_to_json(description: EnvDescription) -> dict[str, Any]:
    """Return groups, spaces and promises as plain data."""
    return {
        "name": description.name,
        "groups": {
            name: {
                "agents": list(group.agents),
                "observation": space_to_json(group.observation),
                "action": space_to_json(group.action),
                "categorical_actions": group.categorical_actions,
                "action_mask": group.action_mask,
                "mask": group.mask,
                "info": {key: list(shape) for key, shape in group.info.items()},
                "episode_reward": group.episode_reward,
            }
            for name, group in description.groups.items()
        },
        "root": {key: space_to_json(space) for key, space in description.root.items()},
        "done_on_any": description.done_on_any,
        "repeats": description.repeats,
        "time_limit": description.time_limit,
    }


def environment_from_json(data: Mapping[str, Any]) -> EnvDescription:
    """Return the description that ``data`` was made of."""
    groups = {
        name: GroupDescription(
            agents=tuple(group["agents"]),
            observation=space_from_json(group["observation"]),
            action=space_from_json(group["action"]),
            categorical_actions=group["categorical_actions"],
            action_mask=group["action_mask"],
            mask=group["mask"],
            info={key: tuple(shape) for key, shape in group["info"].items()},
            episode_reward=group["episode_reward"],
        )
        for name, group in data["groups"].items()
    }
    return EnvDescription(
        name=data["name"],
        groups=groups,
        root={key: space_from_json(space) for key, space in data["root"].items()},
        done_on_any=data["done_on_any"],
        repeats=data["repeats"],
        time_limit=data["time_limit"],
    )
