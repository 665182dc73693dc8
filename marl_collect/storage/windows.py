"""Parts of episodes for training: sequences of frames, and n-step transitions."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.storage.frames import Frames, item_numbers, ranges, starts
from marl_collect.storage.loading import Loadable


@final
class Sequences(Loadable):
    """Pieces of episodes with the same number of frames, for recurrent networks.

    A piece is ``[burn_in + length]``, several are ``[n, burn_in + length]``. Every
    frame of an episode is in a piece. The last piece is padded with zeros behind its
    frames, and pieces with ``burn_in`` in front of them; ``("collector", "mask")`` says
    which frames are valid.
    """

    def __init__(
        self,
        frames: Frames,
        episodes: NDArray[Any],
        length: int,
        stride: int,
        burn_in: int,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, but is {length}.")
        if not 1 <= stride <= length:
            raise ValueError(
                f"stride must be between 1 and length={length}, but is {stride}: "
                "every frame is in a piece."
            )
        if burn_in < 0:
            raise ValueError(f"burn_in must be at least 0, but is {burn_in}.")
        self._frames, self._episodes = frames, episodes
        self._length, self._stride, self._burn_in = length, stride, burn_in
        beyond_first = np.maximum(episodes["length"] - length, 0)
        # The last piece of an episode is the first one that reaches its end.
        self._pieces = starts(1 + -(-beyond_first // stride))

    def __len__(self) -> int:
        return int(self._pieces[-1])

    def __getitem__(self, index: int) -> TensorDict:
        return self.__getitems__([operator.index(index)])[0]

    def __iter__(self) -> Iterator[TensorDict]:
        return (self[i] for i in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        items = item_numbers(indices, len(self), "piece")
        episode = np.searchsorted(self._pieces, items, side="right") - 1
        rows = self._episodes[episode]
        offset = self._stride * (items - self._pieces[episode])
        begin = np.maximum(offset - self._burn_in, 0)
        end = np.minimum(rows["length"], offset + self._length)
        padding = np.maximum(self._burn_in - offset, 0)
        width = self._burn_in + self._length
        return self._frames.padded(rows["first"] + begin, end - begin, width, padding)

    def __repr__(self) -> str:
        width = self._burn_in + self._length
        return f"Sequences({self._frames.name!r}, {len(self)} of {width} frames)"


@final
class NSteps(Loadable):
    """Transitions over several frames of an episode, one that begins at each frame.

    Several are ``[n]``. Keys at the root are those of the first frame, keys under
    ``next`` those of the last one, and rewards are the discounted sum in between.
    ``"steps_to_next_obs"`` ``[n, 1]`` is the number of frames, and ``"gamma"`` ``[n,
    1]`` the discount of the value of the next observation, ``gamma **
    steps_to_next_obs``; the names are those of TorchRL's ``MultiStep``.
    """

    def __init__(
        self, frames: Frames, episodes: NDArray[Any], n: int, gamma: float
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be between 0 and 1, but is {gamma}.")
        root = [column.key for column in frames.keys if not column.root]
        after = [column.key for column in frames.keys if column.root]
        rewards = [column.key for column in frames.keys if column.is_reward]
        if not rewards:
            raise ValueError("No reward is selected: add its key to select().")
        self._frames, self._n, self._gamma = frames, n, gamma
        self._root, self._after = frames.select(*root), frames.select(*after)
        self._rewards = frames.select(*rewards)
        self._episodes, self._starts = episodes, starts(episodes["length"])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        items = item_numbers(indices, len(self), "frame")
        episode = np.searchsorted(self._starts, items, side="right") - 1
        rows = self._episodes[episode]
        offset = items - self._starts[episode]
        steps = np.minimum(self._n, rows["length"] - offset)
        between = self._frames.numbers(rows["first"] + offset, steps)
        item_starts = starts(steps)
        tensors = self._root.read(between[item_starts[:-1]])
        tensors |= self._after.read(between[item_starts[1:] - 1])
        item = torch.from_numpy(np.repeat(np.arange(len(steps)), steps))
        power = torch.from_numpy(ranges(np.zeros_like(steps), steps))
        discount = self._gamma ** power.double()
        for key, values in self._rewards.read(between).items():
            weighted = values * discount.view(-1, *[1] * (values.ndim - 1))
            total = weighted.new_zeros(tensors[key].shape)
            tensors[key] = total.index_add_(0, item, weighted).to(values.dtype)
        count = torch.from_numpy(steps).view(-1, 1)
        tensors["steps_to_next_obs",] = count
        tensors["gamma",] = (self._gamma ** count.double()).float()
        return self._frames.nested(tensors, [len(steps)], time=False)

    def __repr__(self) -> str:
        return f"NSteps({self._frames.name!r}, {len(self)} frames, n={self._n})"
