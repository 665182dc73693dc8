"""Exports episodes to Minari's local store; ``docs/storage.md`` has what becomes what.

Keys that Minari has no place for are ``infos`` with their names: ``[T + 1, ...]`` if
they exist at the root and under ``next``; others, such as rewards, are ``[T, ...]``.

Source:
    The layout is that of Minari 0.5: https://minari.farama.org/content/dataset_standards/
"""

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from pathlib import Path
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, EnvDescription, Key, stored_action
from marl_collect.errors import imports_of
from marl_collect.files.folders import completed
from marl_collect.storage.dataset import Dataset
from marl_collect.storage.episodes import Progress, no_progress
from marl_collect.storage.trajectories import Trajectories

_FILE: Final = "main_data.hdf5"
_METADATA: Final = "metadata.json"
_OURS: Final = "marl_collect"
"""Entry of the metadata with the description and the runs of the dataset."""
_VERSION: Final = "0.5.0"
"""Version of the layout, not of an installed package."""
_ID: Final = re.compile(r"([-\w]+/)*[-\w]+-v\d+")
_CHUNKED_FROM: Final = 8192
"""Bytes of the smallest array that is compressed. HDF5 stores a compressed array in
chunks with an index, which for short episodes is larger than the data."""
_SPARE: Final = 16 * 2**20
"""Bytes that are kept free for what writing adds to the numbers."""
Arrays = dict[Key, NDArray[Any]]
_Source = tuple[Callable[[Arrays, Key], NDArray[Any]], Key, Any]
"""What makes an array of Minari from an episode's frames of a key, and its dtype."""


def export_minari(
    source: Dataset | Trajectories,
    dataset_id: str,
    *,
    progress: Progress = no_progress,
) -> Path:
    """Write complete episodes as a new dataset of Minari's local store.

    The dataset appears when it is complete. An error leaves nothing behind.

    Args:
        source: a dataset, or a selection of its episodes.
        dataset_id: of the new dataset, such as ``"mine/spread-v0"``.
        progress: called after every episode; see ``Progress``.

    Returns:
        The folder of the new dataset.

    Raises:
        ValueError: if the id is none of Minari's, there are no episodes, or the name of
            a group has a slash.
        KeyError: if keys that Minari needs are missing.
        ImportError: if a package is missing. The message says what to install.
        FileExistsError: if there is a dataset with this id.
        BlockingIOError: if another process exports to it.
        OSError: if the disk is full.
    """
    with imports_of("minari", "An export to Minari"):
        import h5py
        from minari.storage.datasets_root_dir import get_dataset_path
    trajectories = source.trajectories if isinstance(source, Dataset) else source
    sources = _sources(trajectories)
    if not _ID.fullmatch(dataset_id):
        raise ValueError(
            f"{dataset_id!r} is not an id of a Minari dataset: use a name with a "
            "version, such as mine/spread-v0."
        )
    target: Path = get_dataset_path(dataset_id)
    runs, seeds = trajectories.run_numbers.tolist(), trajectories.seeds
    done, total = 0, int(trajectories.lengths.sum())
    with completed(target, "export") as path:
        folder = path / "data"
        folder.mkdir(parents=True)
        progress(0, total, ())
        # The newest version of the file format needs far fewer bytes per array.
        with h5py.File(folder / _FILE, "w", track_order=True, libver="latest") as file:
            for number, episode in enumerate(trajectories.episodes):
                frames = trajectories.arrays(number)
                _check_room(sum(a.nbytes for a in frames.values()), folder)
                group = file.create_group(f"episode_{number}")
                group.attrs["id"] = number
                group.attrs["total_steps"] = episode.length
                if seeds[number] is not None:
                    group.attrs["seed"] = seeds[number]
                if len(trajectories.runs) > 1:
                    group.attrs["run"] = runs[number]
                for name, (read, key, dtype) in sources.items():
                    array = read(frames, key)
                    array = array.astype(dtype or array.dtype, copy=False)
                    group.create_dataset(
                        "/".join(name),
                        data=array,
                        compression="gzip" if array.nbytes >= _CHUNKED_FROM else None,
                    )
                done += episode.length
                progress(done, total, [episode])
        metadata = json.dumps(_metadata(trajectories, dataset_id))
        (folder / _METADATA).write_text(metadata, encoding="utf-8")
    return target


def _check_room(nbytes: int, folder: Path) -> None:
    """Check that an episode fits on the disk.

    Where HDF5 writes, a full disk kills the process instead of raising an error.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes + _SPARE:
        raise OSError(
            errno.ENOSPC,
            f"The disk is full: the next episode has up to {nbytes:,} bytes, but only "
            f"{free:,} are free",
            str(folder),
        )


def _metadata(trajectories: Trajectories, dataset_id: str) -> dict[str, Any]:
    from minari.serialization import serialize_space

    about = trajectories.description
    observed, acting = _spaces(about.environment)
    return {
        "dataset_id": dataset_id,
        "minari_version": _VERSION,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": len(trajectories),
        "total_steps": int(trajectories.lengths.sum()),
        "observation_space": serialize_space(observed),
        "action_space": serialize_space(acting),
        # Gymnasium's description of a task; it builds no environment.
        "env_spec": EnvSpec(
            id=re.sub(r"[^\w:.-]+", "_", about.task), kwargs=dict(about.env_kwargs)
        ).to_json(),
        _OURS: about.to_json() | {"runs": [run.to_json() for run in trajectories.runs]},
    }


def _spaces(environment: EnvDescription) -> tuple[spaces.Dict, spaces.Dict]:
    """Return the spaces of Minari's observations and actions."""
    groups = environment.groups
    for name in groups:
        if "/" in name:
            raise ValueError(
                f"Folders in files of Minari are named by '/', which the group {name} "
                "has: collect with a group_map whose names have none."
            )
    observed = {n: batch_space(g.observation, g.n_agents) for n, g in groups.items()}
    acting = {n: batch_space(stored_action(g), g.n_agents) for n, g in groups.items()}
    return spaces.Dict(observed | dict(environment.root)), spaces.Dict(acting)


def _sources(trajectories: Trajectories) -> dict[Key, _Source]:
    """Return where each array of Minari is from, by path."""
    if not len(trajectories):
        raise ValueError(f"There are no complete episodes in {trajectories!r}.")
    fields = {field.key: (field.shape, field.dtype) for field in trajectories.keys}
    environment = trajectories.description.environment
    observed, acting = _spaces(environment)
    sources: dict[Key, _Source] = {
        ("terminations",): (_flat, ("next", "terminated"), None),
        ("truncations",): (_flat, ("next", "truncated"), None),
    }
    for name, space in observed.spaces.items():
        key: Key = (name, "observation") if name in environment.groups else (name,)
        leaves = _leaves(space, key, ("observations", name))
        sources |= {path: (_with_last, leaf, dtype) for leaf, path, dtype in leaves}
    lasts = [key for read, key, _ in sources.values() if read is _with_last]
    for name, space in acting.spaces.items():
        leaves = _leaves(space, (name, "action"), ("actions", name))
        sources |= {path: (getitem, leaf, dtype) for leaf, path, dtype in leaves}
    rewards: list[Key] = [("next", name, "reward") for name in environment.groups]
    used = {key for _, key, _ in sources.values()}
    used |= {("next", *key) for key in lasts}
    for key in (*sorted(used), *rewards):
        if key not in fields:
            raise KeyError(
                f"The episodes have no {'/'.join(key)}, which Minari needs: export all "
                "keys."
            )

    def team(frames: Arrays, _: Key) -> NDArray[Any]:
        values = (frames[key].sum((1, 2), np.float64) for key in rewards)
        return np.sum([*values], 0)

    sources["rewards",] = team, (), None
    for key, kind in fields.items():
        if key not in used and not _follows(fields, key):
            has_last = fields.get(("next", *key)) == kind
            sources["infos", *key] = (_with_last if has_last else getitem), key, None
    return sources


def _follows(fields: Mapping[Key, Any], key: Key) -> bool:
    """Return whether Minari has a key elsewhere, or a flag follows from others."""
    base = key[1:] if key[0] == "next" else key
    is_last = base != key and fields.get(base) == fields[key]
    ends = ((*key[:-1], end) in fields for end in FLAGS[1:])
    return is_last or base[0] in FLAGS or (key[-1] == FLAGS[0] and all(ends))


def _flat(episode: Arrays, key: Key) -> NDArray[Any]:
    return episode[key].reshape(-1)


def _with_last(episode: Arrays, key: Key) -> NDArray[Any]:
    """Return a key at the root, and its last value under ``next``: ``[T + 1, ...]``."""
    return np.concatenate([episode[key][:1], episode["next", *key]])


def _leaves(
    space: spaces.Space[Any], key: Key, path: Key
) -> Iterator[tuple[Key, Key, np.dtype[Any]]]:
    """Yield key, path and dtype of each array in a value of a space."""
    if isinstance(space, spaces.Dict):
        for name, inner in space.spaces.items():
            yield from _leaves(inner, (*key, name), (*path, name))
    elif isinstance(space, spaces.Tuple):
        for i, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*key, str(i)), (*path, f"_index_{i}"))
    else:
        yield key, path, np.dtype(space.dtype)
