"""The TensorDicts that datasets return."""

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict


class _SavedAsTensorDict(type(TensorDict)):  # type: ignore[misc]
    """Makes ``memmap`` and ``save`` write files that need no ``Sample`` to be read."""

    def __str__(cls) -> str:
        """Return the name that tensordict writes as the type."""
        return str(TensorDict)


_NOT_COLLATED = (
    "torch's DataLoader cannot collate TensorDicts: pass collate_fn=DATA.collate, "
    "where DATA is what it loads, or use DATA.loader(batch_size)."
)


class Sample(TensorDict, metaclass=_SavedAsTensorDict):
    """A TensorDict whose errors say where a missing key is, and what to do."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension.

        Raises:
            TypeError: if there is none.
        """
        if not self.batch_dims:  # torch's default_collate takes it for a dict.
            raise TypeError(f"A TensorDict [] has no items. {_NOT_COLLATED}")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Index by key or by position.

        Raises:
            KeyError: if there is no such key. The message names keys that end alike.
            TypeError: if the index is a TensorDict.
        """
        if isinstance(index, TensorDict):
            raise TypeError(f"A TensorDict is not a key. {_NOT_COLLATED}")
        try:
            return super().__getitem__(index)
        except KeyError as error:
            name = index if isinstance(index, str) else index[-1]
            alike = [
                key
                for key in self.keys(include_nested=True, leaves_only=True)
                if (key if isinstance(key, str) else key[-1]) == name
            ]
            if not alike:
                raise
            names = ", ".join(map(repr, alike))
            hint = (
                " What a step returns is under 'next'."
                if any(isinstance(key, tuple) and key[0] == "next" for key in alike)
                else ""
            )
            raise KeyError(f"There is no key {index!r}, but {names}.{hint}") from error
