"""Writes some of the episodes of a dataset to a new one."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from marl_collect.core.tensordicts import assemble, flatten
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.episodes import Progress, no_progress
from marl_collect.storage.files import completed
from marl_collect.storage.packed import Compression, check_compression
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.writer import Writer

_FRAMES: Final = 20_000
_BYTES: Final = 2**26
"""Most frames of a batch, and bytes in memory, unless a single episode has more."""
_NEEDED: Final = (("next", "done"), ("next", "terminated"))


def save(
    trajectories: Trajectories,
    path: str | Path,
    *,
    compression: Compression = "lz4",
    progress: Progress = no_progress,
) -> Dataset:
    """Write some of the episodes of a dataset to a new one.

    To delete episodes, save the others. Runs, seeds, and metadata are kept.

    Args:
        trajectories: the episodes, such as ``dataset.trajectories[:100]``, with all
            keys or with those that were selected.
        path: a folder that does not exist, or is empty.
        compression: of large frames such as images, as for ``record``.
        progress: called after every batch; see ``Progress``.

    Returns:
        The new dataset, opened.

    Raises:
        ValueError: if there are no episodes.
        KeyError: if keys that say where episodes end were not selected.
        FileExistsError: if something is at ``path``.
    """
    check_compression(compression)
    if not len(trajectories):
        raise ValueError(f"There are no complete episodes in {trajectories!r}.")
    names = {field.key for field in trajectories.keys}
    for key in _NEEDED:
        if key not in names:
            raise KeyError(
                f"The episodes have no {'/'.join(key)}, which says where they end: "
                "select it too."
            )
    contents = trajectories.contents
    groups = contents.description.environment.groups
    n_agents = {name: group.n_agents for name, group in groups.items()}
    done, total = 0, int(trajectories.lengths.sum())
    progress(0, total, ())
    with completed(Path(path), "save", or_empty=True) as temporary, ExitStack() as run:
        written = -1
        for number, chosen in _batches(trajectories):
            if number != written:
                run.close()
                writer = run.enter_context(
                    Writer(
                        temporary,
                        contents.description,
                        contents.runs[number],
                        metadata=contents.metadata,
                        compression=compression,
                    )
                )
                written = number
            frames = int(chosen.lengths.sum())
            tensors = {k: t.unsqueeze(0) for k, t in flatten(chosen.cat()).items()}
            ended = writer.add(assemble(tensors, [1, frames], n_agents, time=True))
            done += frames
            progress(done, total, ended)
    return open_dataset(path)


def _batches(trajectories: Trajectories) -> Iterator[tuple[int, Trajectories]]:
    """Yield consecutive episodes of one run, and the number of the run."""
    frame_bytes = sum(field.nbytes for field in trajectories.keys)
    most = max(1, min(_FRAMES, _BYTES // max(1, frame_bytes)))
    runs, lengths = trajectories.runs.tolist(), trajectories.lengths.tolist()
    begin = frames = 0
    for i, (run, length) in enumerate(zip(runs, lengths, strict=True)):
        if i > begin and (run != runs[begin] or frames + length > most):
            yield runs[begin], trajectories[begin:i]
            begin, frames = i, 0
        frames += length
    yield runs[begin], trajectories[begin:]
