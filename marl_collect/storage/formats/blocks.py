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
from marl_collect.storage.index import Index, KeyField, Totals, keys_from_json
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


Rows = NDArray[np.int64] | None
"""Frames of a block whose values are stored; None if all are."""


def no_progress(done: int, total: int, ended: Sequence[EndedEpisode]) -> None:
    """Show nothing."""
    del done, total, ended


def contents_of(trajectories: Trajectories) -> Index:
    """Describe an export of episodes: their runs, keys, metadata, and totals.

    Raises:
        ValueError: if there are no episodes, or a key has a dtype that NumPy lacks.
        KeyError: if keys that say where episodes end were not selected.
    """
    if not len(trajectories):
        raise ValueError(
            f"There are no complete episodes to export in {trajectories!r}."
        )
    names = {field.key for field in trajectories.keys}
    for key in _NEEDED:
        if key not in names:
            raise KeyError(
                f"The episodes have no {'/'.join(key)}, which says where they end: "
                "select it too, or export all keys."
            )
    for field in trajectories.keys:
        if not hasattr(np, field.dtype.replace("bool", "bool_")):
            raise ValueError(
                f"{'/'.join(field.key)} has the dtype {field.dtype}, which other "
                "formats do not have: leave the key out with select()."
            )
    whole = trajectories.contents
    frames = int(trajectories.lengths.sum())
    contents = Index(whole.description, whole.runs, trajectories.keys, whole.metadata)
    contents.totals = Totals(frames, episodes=len(trajectories))
    return contents


def header_to_json(contents: Index) -> dict[str, Any]:
    """Return the description of an export as JSON values."""
    return {
        **contents.description.to_json(),
        "runs": [run.to_json() for run in contents.runs],
        "keys": [key.to_json() for key in contents.keys],
        "episodes": contents.totals.episodes,
        "frames": contents.totals.frames,
        "metadata": contents.metadata.to_json(),
    }


def header_from_json(data: Mapping[str, Any]) -> Index:
    """Return the description of an export from ``header_to_json``."""
    contents = Index(
        DatasetDescription.from_json(data),
        [RunDescription.from_json(run) for run in data["runs"]],
        keys_from_json(data["keys"]),
        Metadata.from_json(data.get("metadata", {})),
    )
    contents.totals = Totals(data["frames"], episodes=data["episodes"])
    return contents


def cuts(
    contents: Index, lengths: Sequence[int], runs: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the first episode of each block, and the one after its last."""
    most = max(1, min(_FRAMES, _BYTES // max(1, contents.frame_bytes)))
    begin = frames = 0
    for i, (run, length) in enumerate(zip(runs, lengths, strict=True)):
        if i > begin and (run != runs[begin] or frames + length > most):
            yield begin, i
            begin, frames = i, 0
        frames += length
    yield begin, len(lengths)


@final
@dataclass(frozen=True)
class Block:
    """Complete episodes of one run, back to back.

    Attributes:
        frames: every key, ``[sum of lengths, ...]``.
        lengths: frames of each episode.
        run: index of the run in the description of the export.
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

    def stored(self, contents: Index) -> Iterator[tuple[KeyField, NDArray[Any], Rows]]:
        """Yield each key, the values that a format stores, and their frames.

        A next value that is the root value of the next frame is not stored, except in
        the last frame of an episode. Of other keys all values are stored; their frames
        are None.
        """
        for field in contents.keys:
            values, root = self.frames[field.key], contents.roots.get(field.key)
            if root is None:
                yield field, values.numpy(), None
                continue
            differs = ~repeats(values[None], self.frames[root][None])[0]
            differs[self.ends] = True
            rows = np.flatnonzero(differs)
            yield field, values.numpy()[rows], rows

    @classmethod
    def restored(
        cls,
        contents: Index,
        stored: Mapping[Key, tuple[NDArray[Any], Rows]],
        lengths: Sequence[int],
        run: int,
    ) -> Self:
        """Return a block from the values and frames that ``stored`` has given."""
        frames = {key: torch.from_numpy(values) for key, (values, _) in stored.items()}
        for key, root in contents.roots.items():
            after = torch.cat([frames[root][1:], frames[root][-1:]])
            after[torch.as_tensor(stored[key][1], device="cpu")] = frames[key]
            frames[key] = after
        return cls(frames, lengths, run)

    def episodes(self) -> Iterator[dict[Key, torch.Tensor]]:
        """Yield each episode, every key ``[T, ...]``."""
        end = 0
        for length in self.lengths:
            begin, end = end, end + length
            yield {key: tensor[begin:end] for key, tensor in self.frames.items()}


def read_blocks(
    trajectories: Trajectories, contents: Index, progress: Progress
) -> Iterator[Block]:
    """Read the episodes of a dataset."""
    runs, done = trajectories.runs.tolist(), 0
    total = contents.totals.frames
    progress(0, total, ())
    for begin, end in cuts(contents, trajectories.lengths.tolist(), runs):
        chosen = trajectories[begin:end]
        lengths = chosen.lengths.tolist()
        yield Block(flatten(chosen.cat()), lengths, runs[begin], chosen.seeds)
        done += sum(lengths)
        progress(done, total, chosen.episodes)


def write_blocks(
    path: Path,
    contents: Index,
    blocks: Iterator[Block],
    compression: Compression,
    progress: Progress,
) -> None:
    """Write episodes to a new dataset.

    Raises:
        ValueError: if a block has other keys than ``contents``, an episode does not
            end where the block says, or episodes are missing.
    """
    totals = contents.totals
    episodes = done = 0

    def batches() -> Iterator[RunBatch]:
        nonlocal episodes
        for number, block in enumerate(blocks):
            _check(contents, block, episodes)
            episodes += len(block.lengths)
            tensors = {key: t.unsqueeze(0) for key, t in block.frames.items()}
            # One dataset may be joined twice, with equal runs and ids of episodes.
            yield contents.runs[block.run], number + block.run, tensors

    def report(frames: int, ended: Sequence[EndedEpisode]) -> None:
        nonlocal done
        done += frames
        progress(done, totals.frames, ended)

    progress(0, totals.frames, ())
    write_runs(path, contents, batches(), compression, report)
    if (episodes, done) != (totals.episodes, totals.frames):
        raise ValueError(
            f"The source has {episodes:,} episodes with {done:,} frames, but its "
            f"header says {totals.episodes:,} with {totals.frames:,}: a part is "
            "missing."
        )


def write_runs(
    path: Path,
    contents: Index,
    batches: Iterator[RunBatch],
    compression: Compression,
    report: Callable[[int, Sequence[EndedEpisode]], None] | None = None,
) -> None:
    """Write batches of several runs to a new dataset.

    Args:
        path: of the dataset.
        contents: description and metadata of the dataset.
        batches: in the order of writing.
        compression: of large frames.
        report: called with the frames of each batch, and the episodes that ended in it.
    """
    groups = contents.description.environment.groups
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
                        contents.description,
                        run,
                        metadata=contents.metadata,
                        compression=compression,
                    )
                )
            before, following = run, number + 1
            size, length = next(iter(tensors.values())).shape[:2]
            batch = assemble(tensors, [size, length], n_agents, time=True)
            ended = writer.add(batch)
            if report is not None:
                report(size * length, ended)


def _check(contents: Index, block: Block, before: int) -> None:
    frames = sum(block.lengths)
    for field in contents.keys:
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
