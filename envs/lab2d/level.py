"""The players of a Lab2d level, and the observations it offers them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_collect.core.description import Field
from marl_collect.envs.lab2d.world import Lab2dWorld

REWARD = "REWARD"
_OF_PLAYER = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True)
class LevelSpec:
    """The structure of a level, derived from the names it uses.

    A level whose actions are called ``"<i>.NAME"`` has numbered players; observations
    without such a prefix belong to no player. Any other level has a single player, who
    owns all actions and observations.

    Attributes:
        prefixes: prefix of each player's names, such as ``("1.", "2.")``; ``("",)`` for
            a level without numbered players.
        fields: full name of each observation to its shape and dtype.
    """

    prefixes: tuple[str, ...]
    fields: Mapping[str, Field]

    @classmethod
    def read(cls, world: Lab2dWorld) -> "LevelSpec":
        """Read the structure from a level that is built.

        Raises:
            ValueError: if only some of the actions belong to numbered players, or if
                the numbers have gaps.
        """
        actions = [*world.discrete_index, *world.continuous_index]
        players = {name: _OF_PLAYER.fullmatch(name) for name in actions}
        numbers = {int(match[1]) for match in players.values() if match}
        common = sorted(name for name, match in players.items() if not match)
        if numbers and common:
            raise ValueError(
                f"The actions {common} have no player prefix, but other actions do: "
                'expected names such as "1.move" for all actions or for none.'
            )
        if numbers and numbers != set(range(1, len(numbers) + 1)):
            raise ValueError(
                "The level must number its players 1, 2, ... without gaps, but the "
                f"numbers are {sorted(numbers)}."
            )
        prefixes = tuple(f"{number}." for number in sorted(numbers)) or ("",)
        return cls(prefixes, world.fields())

    @property
    def has_rewards(self) -> bool:
        """Whether each player has a reward; otherwise one reward is for all."""
        return all(prefix + REWARD in self.fields for prefix in self.prefixes)

    def of_group(
        self, players: Sequence[int], requested: Sequence[str] | None
    ) -> dict[str, Field]:
        """Return the observations that all players of a group have in the same shape.

        Args:
            players: indices of the players, from 0.
            requested: observation names; None for all that can be stored, without
                rewards.

        Returns:
            Name without the player's prefix to shape and dtype.
        """
        prefixes = [self.prefixes[player] for player in players]
        names = self._names_of(prefixes[0]) if requested is None else requested
        common: dict[str, Field] = {}
        for name in names:
            fields = [self.fields.get(prefix + name) for prefix in prefixes]
            first = fields[0]
            if first is not None and all(field == first for field in fields):
                common[name] = first
        return common

    def of_world(self, requested: Sequence[str] | None) -> dict[str, Field]:
        """Return the requested observations that belong to no player."""
        if self.prefixes == ("",) or requested is None:
            return {}
        return {
            name: self.fields[name]
            for name in requested
            if name in self.fields and not _OF_PLAYER.fullmatch(name)
        }

    def check_requested(self, requested: Sequence[str]) -> None:
        """Check that each requested observation exists and can be stored.

        Raises:
            ValueError: if one does not; lists the observations of the level.
        """
        for name in requested:
            full = [name, *(prefix + name for prefix in self.prefixes)]
            fields = [self.fields[key] for key in full if key in self.fields]
            if not fields:
                raise ValueError(
                    f"The level has no observation {name!r}: expected one of "
                    f"{self._names_of(self.prefixes[0])}, which each player has, or "
                    f"one of {sorted(self.fields)}."
                )
            if not all(storable(field) for field in fields):
                raise ValueError(
                    f"The observation {name!r} has dtype {fields[0].dtype} and shape "
                    f"{fields[0].shape}. Only numbers of a fixed shape can be stored "
                    "(dtype object means text, a 0 in the shape a variable size)."
                )

    def _names_of(self, prefix: str) -> list[str]:
        return sorted(
            name.removeprefix(prefix)
            for name, field in self.fields.items()
            if name.startswith(prefix) and storable(field) and name != prefix + REWARD
        )


def storable(field: Field) -> bool:
    """Return whether the observation consists of numbers and has a fixed shape."""
    return field.dtype != object and 0 not in field.shape
