"""Exports episodes to Minari's local store.

An exported episode is a group ``episode_i`` of ``main_data.hdf5``, with
``observations`` ``[T + 1, ...]``, and ``actions``, ``rewards``, ``terminations`` and
``truncations`` ``[T, ...]``. Observations and actions nest by group. Minari supports
one agent only, so ``rewards`` is the sum over all agents. Everything else is in
``infos``: keys that exist at the root and under ``next`` are ``[T + 1, ...]``, rewards
of agents too, with zeros for the reset; other keys are ``[T, ...]``.

Source:
    The layout is that of Minari 0.5: https://minari.farama.org/content/dataset_standards/
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, EnvDescription, Key, stored_action
from marl_collect.storage.description import DatasetDescription
from marl_collect.storage.formats.blocks import Block, header_to_json
from marl_collect.storage.formats.hdf5 import COMPRESSIONS
from marl_collect.storage.formats.registry import Format
from marl_collect.storage.index import Index
from marl_collect.storage.packed import check_compression

_FILE: Final = "main_data.hdf5"
_METADATA: Final = "metadata.json"
_OURS: Final = "marl_collect"
"""Entry of the metadata with the header of the export, for the seeds of its runs."""
_VERSION: Final = "0.5.0"
"""Version of the layout, not of an installed package."""
_ID: Final = re.compile(r"([-\w]+/)*[-\w]+-v\d+")
_CHUNKED_FROM: Final = 8192
"""Bytes of the smallest array that is compressed. HDF5 stores a compressed array in
chunks with an index, which for short episodes is larger than the data."""
Arrays = dict[Key, NDArray[Any]]
_Source = tuple[Callable[[Arrays, Key], NDArray[Any]], Key]
"""A key, and what reads an array of Minari from an episode's frames of it."""


def _export(
    path: Path,
    contents: Index,
    blocks: Iterator[Block],
    target: Path,
    *,
    compression: str = "gzip",
) -> None:
    check_compression(compression, COMPRESSIONS)
    import h5py
    from minari.serialization import serialize_space
    from minari.storage.datasets_root_dir import get_dataset_path

    sources, dtypes = _sources(contents)
    groups = list(contents.description.environment.groups)
    folder = path / "data"
    folder.mkdir(parents=True)
    observed, acting = _spaces(contents.description.environment)
    number = 0
    # The newest version of the file format needs far fewer bytes per array.
    with h5py.File(folder / _FILE, "w", track_order=True, libver="latest") as file:
        for block in blocks:
            for episode, seed in zip(block.episodes(), block.seeds, strict=True):
                group = file.create_group(f"episode_{number}")
                frames = {key: tensor.numpy() for key, tensor in episode.items()}
                rewards = [frames["next", name, "reward"] for name in groups]
                team = np.sum([r.sum((1, 2), np.float64) for r in rewards], 0)
                group.attrs["id"] = number
                group.attrs["total_steps"] = len(team)
                if seed is not None:
                    group.attrs["seed"] = seed
                if len(contents.runs) > 1:
                    group.attrs["run"] = block.run
                _write(group, "rewards", team, compression)
                for name, (read, key) in sources.items():
                    array = read(frames, key)
                    array = array.astype(dtypes.get(name, array.dtype), copy=False)
                    _write(group, "/".join(name), array, compression)
                number += 1
    metadata = {
        "dataset_id": target.relative_to(get_dataset_path()).as_posix(),
        "minari_version": _VERSION,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": contents.totals.episodes,
        "total_steps": contents.totals.frames,
        "observation_space": serialize_space(observed),
        "action_space": serialize_space(acting),
        "env_spec": _env_spec(contents.description),
        _OURS: header_to_json(contents),
    }
    about = contents.metadata
    if about.author:
        metadata["author"] = about.author
    if about.description:
        metadata["description"] = about.description
    (folder / _METADATA).write_text(json.dumps(metadata), encoding="utf-8")


def _locate(target: str) -> Path:
    """Return the folder of a new dataset in the local store."""
    if not _ID.fullmatch(target):
        raise ValueError(
            f"{target!r} is not an id of a Minari dataset: use a name with a "
            "version, such as mine/spread-v0."
        )
    from minari.storage.datasets_root_dir import get_dataset_path

    return get_dataset_path(target)


def _env_spec(about: DatasetDescription) -> str:
    """Return Gymnasium's description of a task as JSON; it builds no environment."""
    name = re.sub(r"[^\w:.-]+", "_", about.task)
    return EnvSpec(id=name, kwargs=dict(about.env_kwargs)).to_json()


def _spaces(environment: EnvDescription) -> tuple[spaces.Dict, spaces.Dict]:
    """Return the spaces of Minari's observations and actions."""
    groups = environment.groups
    observed = {n: batch_space(g.observation, g.n_agents) for n, g in groups.items()}
    acting = {n: batch_space(stored_action(g), g.n_agents) for n, g in groups.items()}
    return spaces.Dict(observed | dict(environment.root)), spaces.Dict(acting)


def _sources(contents: Index) -> tuple[dict[Key, _Source], dict[Key, np.dtype[Any]]]:
    """Return where each array of Minari is from, and the dtypes of some, by path.

    Raises:
        KeyError: if the export lacks a key that Minari needs.
    """
    environment = contents.description.environment
    observed, acting = _spaces(environment)
    sources: dict[Key, _Source] = {
        ("terminations",): (_flat, ("next", "terminated")),
        ("truncations",): (_flat, ("next", "truncated")),
    }
    dtypes: dict[Key, np.dtype[Any]] = {}
    for name, space in observed.spaces.items():
        key: Key = (name, "observation") if name in environment.groups else (name,)
        for leaf, path, dtype in _leaves(space, key, ("observations", name)):
            sources[path], dtypes[path] = (_with_last, leaf), dtype
    for name, space in acting.spaces.items():
        for leaf, path, dtype in _leaves(space, (name, "action"), ("actions", name)):
            sources[path], dtypes[path] = (_plain, leaf), dtype
    _check({field.key for field in contents.keys}, sources)
    return sources | _infos(contents, {key for _, key in sources.values()}), dtypes


def _check(keys: set[Key], sources: Mapping[Key, _Source]) -> None:
    for read, key in sources.values():
        if key not in keys:
            raise KeyError(
                f"The episodes have no {'/'.join(key)}, which Minari needs: export all "
                "keys, or to another format."
            )
        if read is _with_last and ("next", *key) not in keys:
            raise KeyError(
                f"The dataset has no {'/'.join(key)} under 'next', so the last "
                "observations of episodes are missing: it was collected with "
                "compact_obs=True. Collect without that option to export to Minari, or "
                "export to another format."
            )


def _infos(contents: Index, needed: set[Key]) -> dict[Key, _Source]:
    """Return where Minari's infos are from: all keys that are not needed elsewhere."""
    infos: dict[Key, _Source] = {}
    keys = {field.key for field in contents.keys}
    for field in contents.keys:
        key = field.key
        base = key[1:] if key[0] == "next" else key
        if base in needed or key in needed or _follows(keys, base, key):
            continue
        if base == key:
            after = ("next", *key)
            infos["infos", *key] = (
                _with_last if after in contents.roots else _plain,
                key,
            )
        elif key not in contents.roots:
            infos["infos", *(key if base in keys else base)] = _with_zeros, key
    return infos


def _follows(keys: set[Key], base: Key, key: Key) -> bool:
    """Return whether a flag follows from others.

    Those at the root follow from terminations and truncations, and an agent is done if
    it is terminated or truncated.
    """
    ends = [(*key[:-1], name) for name in FLAGS[1:]]
    done = key[-1] == FLAGS[0] and keys.issuperset(ends)
    return done or base[0] in FLAGS


def _plain(episode: Arrays, key: Key) -> NDArray[Any]:
    return episode[key]


def _flat(episode: Arrays, key: Key) -> NDArray[Any]:
    return episode[key].reshape(-1)


def _with_last(episode: Arrays, key: Key) -> NDArray[Any]:
    """Return a key at the root, and its last value under ``next``: ``[T + 1, ...]``."""
    return np.concatenate([episode[key][:1], episode["next", *key]])


def _with_zeros(episode: Arrays, key: Key) -> NDArray[Any]:
    """Return a key that is under ``next`` only, after zeros: ``[T + 1, ...]``."""
    values = episode[key]
    whole = np.concatenate([np.zeros_like(values[:1]), values])
    return whole[..., 0] if whole.shape[-1:] == (1,) else whole


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


def _write(group: Any, path: str, array: NDArray[Any], compression: str) -> None:
    import h5py

    if array.nbytes >= _CHUNKED_FROM and compression != "none":
        group.create_dataset(path, data=array, compression=compression)
        return
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if array.nbytes < _CHUNKED_FROM:  # Stored inside its header.
        settings.set_layout(h5py.h5d.COMPACT)
    group.create_dataset(path, data=array, dcpl=settings)


FORMAT: Final = Format(
    summary="a dataset in the local store of Minari; the target is its id",
    extra="minari",
    packages=("h5py", "minari"),
    export=_export,
    locate=_locate,
)
