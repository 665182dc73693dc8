"""What a level of Lab2d offers: its players, and what each of them may observe."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_collect.core.description import Field
from marl_collect.envs.lab2d.world import Lab2dWorld

REWARD = "REWARD"
_OF_PLAYER = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True)
class LevelSpec:
    """A level, as its names say.

    A level whose actions are called ``"<i>.NAME"`` has players, and what has no such
    prefix is seen once per frame. Any other level has one player, to whom everything
    belongs.

    Attributes:
        prefixes: of each player's names, ``("1.", "2.")``; ``("",)`` without players.
        fields: shape and dtype of all that can be observed, by its full name.
    """

    prefixes: tuple[str, ...]
    fields: Mapping[str, Field]

    @classmethod
    def read(cls, world: Lab2dWorld) -> "LevelSpec":
        """Ask a level that is built.

        Raises:
            ValueError: if some of its actions belong to players and some do not.
        """
        actions = [*world.discrete_index, *world.continuous_index]
        players = {name: _OF_PLAYER.fullmatch(name) for name in actions}
        numbers = {int(match[1]) for match in players.values() if match}
        common = sorted(name for name, match in players.items() if not match)
        if numbers and common:
            raise ValueError(
                f"The actions {common} belong to no player, but others do: expected "
                'names such as "1.move" for all of them, or for none.'
            )
        if numbers and numbers != set(range(1, len(numbers) + 1)):
            raise ValueError(
                f"The level's players must count from 1, but are {sorted(numbers)}."
            )
        prefixes = tuple(f"{number}." for number in sorted(numbers)) or ("",)
        return cls(prefixes, world.fields())

    @property
    def has_rewards(self) -> bool:
        """Whether each player has its own reward; otherwise the level has one."""
        return all(prefix + REWARD in self.fields for prefix in self.prefixes)

    def of_group(
        self, players: Sequence[int], asked: Sequence[str] | None
    ) -> dict[str, Field]:
        """Return the observations, without prefix, of a group's players.

        Args:
            players: counted from 0.
            asked: names wanted; None for all that can be stored, rewards excepted.
        """
        prefixes = [self.prefixes[player] for player in players]
        names = self._names_of(prefixes[0]) if asked is None else asked
        found: dict[str, Field] = {}
        for name in names:
            fields = [self.fields.get(prefix + name) for prefix in prefixes]
            first = fields[0]
            if first is not None and all(field == first for field in fields):
                found[name] = first
        return found

    def of_world(self, asked: Sequence[str] | None) -> dict[str, Field]:
        """Return the observations asked for that belong to no player."""
        if self.prefixes == ("",) or asked is None:
            return {}
        return {
            name: self.fields[name]
            for name in asked
            if name in self.fields and not _OF_PLAYER.fullmatch(name)
        }

    def check_asked(self, asked: Sequence[str]) -> None:
        """Check that each name asked for is there and can be stored.

        Raises:
            ValueError: naming what there is instead.
        """
        for name in asked:
            full = [name, *(prefix + name for prefix in self.prefixes)]
            fields = [self.fields[key] for key in full if key in self.fields]
            if not fields:
                raise ValueError(
                    f"The level has no observation {name!r}. Its players have "
                    f"{self._names_of(self.prefixes[0])}; all there is: "
                    f"{sorted(self.fields)}."
                )
            if not all(storable(field) for field in fields):
                raise ValueError(
                    f"The observation {name!r} is {fields[0].dtype} of shape "
                    f"{fields[0].shape}: only numbers of a fixed shape can be stored "
                    "(a 0 stands for a size that changes, object for text)."
                )

    def _names_of(self, prefix: str) -> list[str]:
        return sorted(
            name.removeprefix(prefix)
            for name, field in self.fields.items()
            if name.startswith(prefix) and storable(field) and name != prefix + REWARD
        )


def storable(field: Field) -> bool:
    """Return whether the observation is numbers of a fixed shape."""
    return field.dtype != object and 0 not in field.shape
