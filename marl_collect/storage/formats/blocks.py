"""Complete episodes on their way between a dataset and another format.

A format exports and imports *blocks*: several complete episodes of one run, back to
back, as one tensor per key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.core.tensordicts import assemble, flatten
from marl_collect.storage.description import (
    DatasetDescription,
    Metadata,
    RunDescription,
)
from marl_collect.storage.encoding import repeats
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.index import KeyField, keys_from_json, root_of
from marl_collect.storage.packed import Compression
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.writer import Writer

_BYTES: Final = 2**26
"""Size of a block in memory, unless a single episode is larger."""
_FRAMES: Final = 20_000
"""Most frames of a block, for the display of progress."""
_NEEDED: Final = (("next", "done"), ("next", "terminated"))

Progress = Callable[[int, int, Sequence[EndedEpisode]], None]
"""Called at the start and after every block: frames so far, frames in total, and the
episodes of the block."""

RunBatch = tuple[RunDescription, int, Mapping[Key, torch.Tensor]]
"""A batch ``[B, T]``: its run, its number, and its tensors by key. The number follows
that of the batch before, unless a batch of the run is missing between them."""


def no_progress(done: int, total: int, ended: Sequence[EndedEpisode]) -> None:
    """Show nothing."""
    del done, total, ended


@final
@dataclass(frozen=True)
class Header:
    """What is known about all episodes of an export.

    Attributes:
        description: task, groups and spaces.
        runs: the runs that wrote the episodes.
        keys: key, shape of a frame, and dtype of every tensor.
        episodes: number of episodes.
        frames: number of their frames.
        metadata: author, license and the like.
    """

    description: DatasetDescription
    runs: tuple[RunDescription, ...]
    keys: tuple[KeyField, ...]
    episodes: int
    frames: int
    metadata: Metadata

    @classmethod
    def of(cls, trajectories: Trajectories) -> Self:
        """Describe a selection of episodes.

        Raises:
            ValueError: if there are no episodes, or a key has a dtype that NumPy lacks.
            KeyError: if keys that say where episodes end were not selected.
        """
        if not len(trajectories):
            raise ValueError(
                f"There are no complete episodes to export in {trajectories!r}."
            )
        keys = trajectories.keys
        names = {field.key for field in keys}
        for key in _NEEDED:
            if key not in names:
                raise KeyError(
                    f"The episodes have no {'/'.join(key)}, which says where they end: "
                    "select it too, or export all keys."
                )
        for field in keys:
            if not hasattr(np, field.dtype.replace("bool", "bool_")):
                raise ValueError(
                    f"{'/'.join(field.key)} has the dtype {field.dtype}, which other "
                    "formats do not have: leave the key out with select()."
                )
        frames = int(trajectories.lengths.sum())
        contents = trajectories.contents
        return cls(
            contents.description,
            tuple(contents.runs),
            keys,
            len(trajectories),
            frames,
            contents.metadata,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the header as JSON values."""
        return {
            **self.description.to_json(),
            "runs": [run.to_json() for run in self.runs],
            "keys": [key.to_json() for key in self.keys],
            "episodes": self.episodes,
            "frames": self.frames,
            "metadata": self.metadata.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the header from the output of ``to_json``."""
        return cls(
            DatasetDescription.from_json(data),
            tuple(RunDescription.from_json(run) for run in data["runs"]),
            keys_from_json(data["keys"]),
            data["episodes"],
            data["frames"],
            Metadata.from_json(data.get("metadata", {})),
        )

    def cuts(
        self, lengths: Sequence[int], runs: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the first episode of each block, and the one after its last."""
        frame = sum(field.nbytes for field in self.keys)
        most = max(1, min(_FRAMES, _BYTES // max(1, frame)))
        begin = frames = 0
        for i, (run, length) in enumerate(zip(runs, lengths, strict=True)):
            if i > begin and (run != runs[begin] or frames + length > most):
                yield begin, i
                begin, frames = i, 0
            frames += length
        yield begin, len(lengths)

    def root_of(self, key: Key) -> Key | None:
        """Return the root key that ``key`` repeats one frame later, if there is one."""
        (item,) = (field for field in self.keys if field.key == key)
        return root_of(item, self.keys)


@final
@dataclass(frozen=True)
class Block:
    """Complete episodes of one run, back to back.

    Attributes:
        frames: every key, ``[sum of lengths, ...]``.
        lengths: frames of each episode.
        run: index of the run in the header.
        seeds: seed that each episode was reset with, None if it is unknown; they are
            exported, and empty in an import.
    """

    frames: Mapping[Key, torch.Tensor]
    lengths: Sequence[int]
    run: int = 0
    seeds: Sequence[int | None] = ()

    @property
    def ends(self) -> NDArray[np.int64]:
        """Position of the last frame of each episode."""
        return np.cumsum(self.lengths) - 1

    def episodes(self) -> Iterator[dict[Key, torch.Tensor]]:
        """Yield each episode, every key ``[T, ...]``."""
        end = 0
        for length in self.lengths:
            begin, end = end, end + length
            yield {key: tensor[begin:end] for key, tensor in self.frames.items()}


def read_blocks(
    trajectories: Trajectories, header: Header, progress: Progress
) -> Iterator[Block]:
    """Read the episodes of a dataset."""
    runs, done = trajectories.runs.tolist(), 0
    progress(0, header.frames, ())
    for begin, end in header.cuts(trajectories.lengths.tolist(), runs):
        chosen = trajectories[begin:end]
        lengths = chosen.lengths.tolist()
        yield Block(flatten(chosen.cat()), lengths, runs[begin], chosen.seeds)
        done += sum(lengths)
        progress(done, header.frames, chosen.episodes)


def write_blocks(
    path: Path,
    header: Header,
    blocks: Iterator[Block],
    compression: Compression,
    progress: Progress,
) -> None:
    """Write episodes to a new dataset.

    Raises:
        ValueError: if a block has other keys than the header says, an episode does not
            end where the block says, or episodes are missing.
    """
    episodes = done = 0

    def batches() -> Iterator[RunBatch]:
        nonlocal episodes
        for number, block in enumerate(blocks):
            _check(header, block, episodes)
            episodes += len(block.lengths)
            tensors = {key: t.unsqueeze(0) for key, t in block.frames.items()}
            # One dataset may be joined twice, with equal runs and ids of episodes.
            yield header.runs[block.run], number + block.run, tensors

    def report(frames: int, ended: Sequence[EndedEpisode]) -> None:
        nonlocal done
        done += frames
        progress(done, header.frames, ended)

    progress(0, header.frames, ())
    write_runs(
        path, header.description, header.metadata, batches(), compression, report
    )
    if (episodes, done) != (header.episodes, header.frames):
        raise ValueError(
            f"The source has {episodes:,} episodes with {done:,} frames, but its "
            f"header says {header.episodes:,} with {header.frames:,}: a part is "
            "missing."
        )


def write_runs(
    path: Path,
    description: DatasetDescription,
    metadata: Metadata,
    batches: Iterator[RunBatch],
    compression: Compression,
    report: Callable[[int, Sequence[EndedEpisode]], None] | None = None,
) -> None:
    """Write batches of several runs to a new dataset.

    Args:
        path: of the dataset.
        description: of the dataset.
        metadata: of the dataset.
        batches: in the order of writing.
        compression: of large frames.
        report: called with the frames of each batch, and the episodes that ended in it.
    """
    groups = description.environment.groups
    n_agents = {name: group.n_agents for name, group in groups.items()}
    before: RunDescription | None = None
    following = -1
    with ExitStack() as stack:
        for run, number, tensors in batches:
            if run is not before or number != following:
                stack.close()
                writer = stack.enter_context(
                    Writer(
                        path,
                        description,
                        run,
                        metadata=metadata,
                        compression=compression,
                    )
                )
            before, following = run, number + 1
            size, length = next(iter(tensors.values())).shape[:2]
            batch = assemble(tensors, [size, length], n_agents, time=True)
            ended = writer.add(batch)
            if report is not None:
                report(size * length, ended)


def stored_next(
    root: torch.Tensor, after: torch.Tensor, ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the frames whose next value is not the root value of the next frame.

    The last frames of episodes are always among them. Other formats store the next
    values of these frames only; ``with_next`` restores the others.
    """
    differs = ~repeats(after[None], root[None])[0]
    differs[ends] = True
    return np.flatnonzero(differs)


def with_next(
    root: torch.Tensor, stored: NDArray[np.int64], values: torch.Tensor
) -> torch.Tensor:
    """Return all next values; the inverse of ``stored_next``."""
    after = torch.cat([root[1:], root[-1:]])
    after[torch.from_numpy(stored)] = values
    return after


def _check(header: Header, block: Block, before: int) -> None:
    frames = sum(block.lengths)
    for field in header.keys:
        tensor = block.frames.get(field.key)
        actual = None if tensor is None else (*tensor.shape, str(tensor.dtype)[6:])
        if actual != (frames, *field.shape, field.dtype):
            raise ValueError(
                f"{'/'.join(field.key)} of the episodes from {before} on must be "
                f"{[frames, *field.shape]} {field.dtype}, but is {actual}. The source "
                "is damaged or was changed."
            )
    done = block.frames["next", "done"].reshape(frames).numpy()
    ends = block.ends
    if not np.array_equal(np.flatnonzero(done), ends):
        wrong = np.flatnonzero(done != np.isin(np.arange(frames), ends))[0]
        episode = int(np.searchsorted(ends, wrong))
        step = int(wrong - (ends[episode - 1] + 1 if episode else 0))
        what = "ends" if done[wrong] else "does not end"
        raise ValueError(
            f"Episode {before + episode} {what} in its frame {step} of "
            f"{block.lengths[episode]}: the last frame of an episode, and no other, "
            "must be terminated or truncated."
        )
