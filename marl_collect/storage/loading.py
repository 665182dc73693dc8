"""``dataset.loader``: seeded, resumable mini-batches for training."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, final

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from marl_collect.storage.selection import Sequences, Trajectories
from marl_collect.storage.transitions import Transitions

Of = Literal["transitions", "trajectories", "sequences"]


@final
class Loader:
    """Yields every item once per epoch, in mini-batches.

    One ``for`` loop is one epoch. The order depends on the seed and the epoch only, not
    on the number of workers. ``state_dict`` after a batch and ``load_state_dict`` in
    another process continue with the next batch.

    Attributes:
        epoch: number of the epoch that is running, or comes next.
    """

    def __init__(
        self,
        source: Transitions | Trajectories | Sequences,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | None,
        workers: int,
        pin_memory: bool | None,
    ) -> None:
        """Prepare the loader; see ``Dataset.loader``."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
        if workers < 0:
            raise ValueError(f"workers must be at least 0, but is {workers}.")
        if not len(source):
            raise ValueError(f"There is nothing to load in {source!r}.")
        self._source = source
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        self._workers = workers
        can_pin = torch.cuda.is_available()
        self._pin = can_pin if pin_memory is None else pin_memory and can_pin
        self.epoch = 0
        self._done = 0  # Batches of the epoch that were yielded.

    def __repr__(self) -> str:
        """Return the data and the size of a batch."""
        return f"Loader({self._source!r}, batch_size={self._batch_size})"

    def __len__(self) -> int:
        """Number of batches of an epoch; the last one may be smaller."""
        return math.ceil(len(self._source) / self._batch_size)

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield the rest of the epoch, or the next one if nothing is left."""
        batches = self._order()[self._done :]
        loader: Any = DataLoader(
            self._source,  # type: ignore[arg-type] # has __len__ and __getitems__
            batch_sampler=batches,
            num_workers=self._workers,
            pin_memory=self._pin,
            collate_fn=_unchanged,
        )
        for batch in loader:
            self._done += 1
            if self._done == len(self):
                self.epoch, self._done = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: seed, epoch, and batches of the epoch that are done."""
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "batches": self._done,
            "items": len(self._source),
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position; the next ``for`` loop yields the rest of its epoch.

        Raises:
            ValueError: if the state is of a loader with other items or batches.
        """
        here = self.state_dict()
        for name in ("items", "batch_size"):
            if state[name] != here[name]:
                raise ValueError(
                    f"The state is of a loader with {name} {state[name]}, but this one "
                    f"has {here[name]}. Open the same dataset with the same arguments."
                )
        self._seed, self.epoch = state["seed"], state["epoch"]
        self._done = state["batches"]

    def _order(self) -> list[list[int]]:
        order = np.arange(len(self._source))
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        edges = range(self._batch_size, len(order), self._batch_size)
        return [part.tolist() for part in np.split(order, list(edges))]


def _unchanged(batch: TensorDict) -> TensorDict:
    return batch
