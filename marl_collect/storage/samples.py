"""The TensorDicts that datasets return; torch's ``DataLoader`` collates them."""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch.utils.data._utils.collate import default_collate_fn_map


class _SavedAsTensorDict(type(TensorDict)):  # type: ignore[misc]
    """Makes ``memmap`` and ``save`` write files that need no ``Sample`` to be read."""

    def __str__(cls) -> str:
        """Return the name that tensordict writes as the type."""
        return str(TensorDict)


class Sample(TensorDict, metaclass=_SavedAsTensorDict):
    """A TensorDict whose error for a missing key says where a similar one is."""

    def __getitem__(self, index: Any) -> Any:
        """Index by key or by position.

        Raises:
            KeyError: if there is no such key. The message names keys that end alike.
        """
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
            places = ", ".join(map(repr, alike))
            hint = (
                " What a step returns is under 'next'."
                if any(isinstance(key, tuple) and key[0] == "next" for key in alike)
                else ""
            )
            raise KeyError(f"There is no key {index!r}, but {places}.{hint}") from error


def collate(batch: Any, *, collate_fn_map: Any = None) -> TensorDict:  # noqa: ARG001
    """Return a batch that was read as one, or stack single frames."""
    if isinstance(batch, TensorDict):
        return batch
    return cast(TensorDict, torch.stack(list(batch)))


# torch documents this table for types that it does not know. A plain DataLoader finds
# the function by the type of a batch's first element.
default_collate_fn_map[Sample] = collate
