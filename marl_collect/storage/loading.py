"""Seeded, resumable mini-batches for training: ``loader`` of a dataset's selections."""

import abc
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.utils.data import DataLoader

from marl_collect.buffers.layout import VALID
from marl_collect.collectors.options import MOST_FRAMES
from marl_collect.core.description import Key
from marl_collect.core.ranks import Ranks
from marl_collect.core.seeding import LARGEST_SEED, Purpose, draw_seed, generator_for
from marl_collect.core.tensordicts import key_path
from marl_collect.options import Option, Options, method, require
from marl_collect.storage.statistics import Moments

_LEAST_STD: Final = 1e-6
"""Standard deviation by which elements that hardly vary are divided."""


@final
@dataclass(frozen=True)
class LoaderArguments(Options):
    """The arguments of ``loader``."""

    batch_size: Annotated[
        int,
        Option("items per mini-batch; with several ranks, of each rank", at_least=1),
    ]
    _: KW_ONLY
    shuffle: Annotated[bool, Option("draw a new order for every epoch")] = True
    seed: Annotated[
        int | None,
        Option("of the order; random if None", at_least=0, at_most=LARGEST_SEED),
    ] = None
    drop_last: Annotated[
        bool,
        Option("leave out the last mini-batch of an epoch if it is smaller"),
    ] = False
    rank: Annotated[
        int | None,
        Option(
            "which part of each epoch to yield, of `world_size` parts. None: that of "
            "`torch.distributed` or torchrun, or else 0",
            at_least=0,
        ),
    ] = None
    world_size: Annotated[
        int | None,
        Option(
            "number of processes that train together; goes with `rank`. As in torch's "
            "`DistributedSampler`, all ranks get equally many items: some items are "
            "repeated, or with `drop_last` left out. Give all ranks one seed",
            at_least=1,
        ),
    ] = None
    workers: Annotated[
        int,
        Option(
            "processes that read, started for each epoch; 0 reads in this process",
            at_least=0,
        ),
    ] = 0


class Loadable(abc.ABC):
    """Items that are read many at once, in any order."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def _items(self, numbers: NDArray[np.int64]) -> TensorDict:
        """Read items by their numbers, which are in range."""

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """Read items; torch's ``DataLoader`` calls this method."""
        return self._items(item_numbers(indices, len(self), "item"))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> TensorDict:
        """Sample ``n`` items uniformly, with replacement.

        Returns:
            ``[n]`` frames, or ``[n, longest]`` episodes or sequences, padded with zeros
            and with a bool ``("collector", "mask")``.

        Raises:
            TypeError: if ``n`` is not an integer.
            ValueError: if there are no items, or ``n`` is negative.
        """
        n = require("n", n, int, Option("", at_least=0, at_most=MOST_FRAMES))
        if not len(self):
            raise ValueError(f"There is nothing to sample in {self!r}.")
        numbers = torch.randint(len(self), (n,), generator=generator, device="cpu")
        return self._items(numbers.numpy())

    @staticmethod
    def collate(batch: TensorDict | Sequence[TensorDict]) -> TensorDict:
        """Return a batch that was read as one, or stack items; torch's collate_fn."""
        if not isinstance(batch, Sequence):
            return batch
        return cast(TensorDict, torch.stack(list(batch)))

    @method(LoaderArguments)
    def loader(self, options: LoaderArguments) -> "Loader":
        """Return mini-batches for training: seeded and resumable.

        Raises:
            ValueError: if there is nothing to load, or an argument does not fit.
        """
        return Loader(self, options)

    def normalised(self, moments: Mapping[Key, Moments]) -> "Items":
        """Return the same items with normalised values, as float32.

        Their mean is 0 and their standard deviation 1. Elements that never vary, and
        padding, are 0.

        Args:
            moments: of each key to normalise; see ``Transitions.moments``. The same key
                under ``next`` is normalised too, by its own moments if there are any.

        Raises:
            KeyError: if the items have no such key.
        """
        by_key = {key_path(key): of_key for key, of_key in moments.items()}
        nothing = self.__getitems__([])
        for key in by_key:
            nothing[key]  # Raises a KeyError that says what there is.
        after: dict[Key, Moments] = {("next", *key): by_key[key] for key in by_key}
        read = partial(_normalised, self, after | by_key)
        return Items(f"{self!r}, normalised: {list(moments)}", len(self), read)


@final
class Items(Loadable):
    """Items that are made of others when they are read: ``read([0, 1])`` returns two.

    ``items[i]`` is one item, a slice reads several, and a loop yields all of them.
    """

    def __init__(
        self, name: str, count: int, read: Callable[[NDArray[np.int64]], TensorDict]
    ) -> None:
        self._name, self._count, self._read = name, count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> TensorDict:
        if isinstance(index, slice):
            return self.__getitems__(range(len(self))[index])
        return self.__getitems__([operator.index(index)])[0]

    def __iter__(self) -> Iterator[TensorDict]:
        return (self[i] for i in range(len(self)))

    def _items(self, numbers: NDArray[np.int64]) -> TensorDict:
        return self._read(numbers)

    def __repr__(self) -> str:
        return f"Items({self._name}, {len(self)})"


def _normalised(
    source: Loadable, moments: Mapping[Key, Moments], indices: NDArray[np.int64]
) -> TensorDict:
    items = source.__getitems__(indices.tolist())
    padding = items.get(VALID, None)
    for key, of_key in moments.items():
        values = items.get(key, None)
        if values is None:
            continue
        scaled = (values.float() - of_key.mean) / of_key.std.clamp(min=_LEAST_STD)
        if padding is not None:
            shape = (*padding.shape, *[1] * (scaled.ndim - padding.ndim))
            scaled *= padding.view(shape)
        items.set(key, scaled)
    return items


def item_numbers(numbers: Any, count: int, what: str) -> NDArray[np.int64]:
    """Return numbers of ``count`` items, which may count from the end, from 0 on."""
    array = np.asarray(numbers)  # As int64, large ones would be others, or errors.
    wrong = array[(array < -count) | (array >= count)]
    if wrong.size:
        raise IndexError(
            f"{what.capitalize()} {wrong[0]} is out of range: there are {count}."
        )
    array = array.astype(np.int64)
    return np.where(array < 0, array + count, array)


@final
class Loader:
    """Yields every item once per epoch, in mini-batches.

    One ``for`` loop is one epoch, or the rest of one after ``load_state_dict``. ``len``
    is the number of its batches. The order depends on the seed and the epoch only, not
    on the number of workers. Several loops at a time are independent: each is an epoch
    of its own. ``state_dict`` after a batch and ``load_state_dict``, here or in another
    process, continue with the next batch.
    """

    def __init__(self, source: Loadable, options: LoaderArguments) -> None:
        self._ranks = Ranks.of(options.rank, options.world_size)
        if self._ranks.world_size > 1 and options.seed is None:
            raise ValueError(
                f"{self._ranks.world_size} ranks must draw the same order: give all of "
                "them one seed. To read everything in each, pass rank=0 and "
                "world_size=1."
            )
        if not len(source):
            raise ValueError(f"There is nothing to load in {source!r}.")
        self._source = source
        self._options = options
        self._seed = draw_seed(options.seed)
        self._rounded = math.floor if options.drop_last else math.ceil
        self._share = self._rounded(len(source) / self._ranks.world_size)
        # Of the latest loop. The next one begins an epoch, or continues this one.
        self._epoch, self._done = 0, 0
        self._continues = True
        if not len(self):
            raise ValueError(
                f"drop_last leaves no batch of {options.batch_size} for each of "
                f"{self._ranks.world_size} ranks in {source!r}."
            )

    def __repr__(self) -> str:
        return f"Loader({self._source!r}, batch_size={self._options.batch_size})"

    def __len__(self) -> int:
        return self._rounded(self._share / self._options.batch_size)

    @property
    def epoch(self) -> int:
        """Number of the epoch of the latest loop; of the next one if that is done."""
        return self._epoch + (self._done == len(self))

    def __iter__(self) -> Iterator[TensorDict]:
        if not self._continues or self._done == len(self):
            self._epoch, self._done = self._epoch + 1, 0
        self._continues = False
        return self._loop(self._epoch, self._done)

    def _loop(self, epoch: int, done: int) -> Iterator[TensorDict]:
        workers = self._options.workers
        with torch.device("cpu"):  # It draws, on whatever device is the default.
            loader = iter(
                DataLoader(
                    self._source,  # type: ignore[arg-type] # has the methods
                    batch_sampler=self._order(epoch)[done:],
                    num_workers=workers,
                    # Other methods, such as TorchRL's default, run the script again.
                    multiprocessing_context="fork" if workers else None,
                    pin_memory=torch.cuda.is_available(),
                    collate_fn=self._source.collate,
                    generator=torch.Generator(),  # Not the user's.
                )
            )
        for batch in loader:
            done += 1
            if epoch == self._epoch:
                self._done = done
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: seed, epoch, and batches of the epoch that are done."""
        names = ("batch_size", "shuffle", "drop_last")
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "batches": self._done % len(self),
            "items": len(self._source),
            "world_size": self._ranks.world_size,
            **{name: int(getattr(self._options, name)) for name in names},
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position; the next ``for`` loop yields the rest of its epoch.

        Raises:
            TypeError: if the state lacks the position, or it has other types.
            ValueError: if the state is of a loader with other items or batches, or has
                a position that does not exist.
        """
        for name, here in list(self.state_dict().items())[3:]:
            there = state.get(name)
            if there != here:
                raise ValueError(
                    f"The state is of a loader with {name} {there}, but this one has "
                    f"{here}. Open the same dataset with the same arguments."
                )
        most = {"seed": LARGEST_SEED, "epoch": LARGEST_SEED, "batches": len(self) - 1}
        seed, epoch, done = (
            require(f"state['{name}']", state.get(name), int, Option("", 0, last))
            for name, last in most.items()
        )
        self._seed, self._epoch, self._done = seed, epoch, done
        self._continues = True

    def _order(self, epoch: int) -> list[list[int]]:
        """Return the items of each of this rank's batches."""
        size, ranks = self._options.batch_size, self._ranks
        order = np.arange(len(self._source))
        if self._options.shuffle:
            order = generator_for(self._seed, Purpose.LOADER, epoch).permutation(order)
        # All ranks get equally many: some are left out, or the first ones repeated.
        order = np.resize(order, self._share * ranks.world_size)
        order = order[ranks.rank :: ranks.world_size]
        batches = np.split(order, range(size, len(order), size))
        return [batch.tolist() for batch in batches[: len(self)]]
