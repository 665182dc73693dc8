"""Exports complete episodes to HDF5, in the layout that Minari reads.

One file holds a group ``episode_i`` for each episode, with ``observations`` and
``infos`` ``[T + 1, ...]``, and ``actions``, ``rewards``, ``terminations`` and
``truncations`` ``[T, ...]``. Observations and actions nest by group. Minari supports
one agent only, so ``rewards`` is the sum over all agents, and the rewards of each agent
are infos.

Source:
    The layout is that of Minari 0.5: https://minari.farama.org/content/dataset_standards/
"""

import json
import re
from pathlib import Path
from typing import Any, final

import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase

from marl_collect.core.description import FLAGS, EnvDescription, stored_action
from marl_collect.storage.dataset import Dataset
from marl_collect.storage.selection import Trajectories

FILE = "main_data.hdf5"
METADATA = "metadata.json"
_MINARI_VERSION = "0.5.0"
"""Version of the layout, not of an installed package."""

_COMPRESSIONS = ("gzip", "lzf", "szip", "none")
_CHUNKED_FROM = 8192
"""Bytes of the smallest array that is compressed. HDF5 stores a compressed array in
chunks with an index, which for short episodes is larger than the data."""
_INFOS = ("mask", "action_mask", *FLAGS)


def export_hdf5(
    source: Dataset | Trajectories,
    path: str | Path,
    *,
    dataset_id: str | None = None,
    compression: str | None = "gzip",
    env_spec: str | None = None,
) -> Path:
    """Write complete episodes to ``path/main_data.hdf5`` and ``path/metadata.json``.

    Needs the extra ``hdf5``. Other tools open the file with h5py; Minari opens the
    folder: ``minari.MinariDataset(path)``.

    Args:
        source: a dataset, or a selection of its episodes.
        path: a folder that does not exist or is empty.
        dataset_id: Minari's name of the dataset; ``marl_collect/TASK-v0`` if None.
        compression: ``"gzip"``, ``"lzf"``, or None for none.
        env_spec: Gymnasium's description of the environment as JSON; left out if None.

    Returns:
        The file.

    Raises:
        ImportError: if h5py is not installed. The message says what to install.
        FileExistsError: if the folder is not empty.
        KeyError: if observations under ``next`` were left out (``compact_obs``).
        ValueError: if the compression is unknown, there are no episodes, or a file of
            the dataset is damaged.
    """
    if isinstance(compression, str) and compression not in _COMPRESSIONS:
        raise ValueError(
            f"compression is {compression!r}, but must be one of "
            f"{', '.join(_COMPRESSIONS)}."
        )
    compression = None if compression == "none" else compression
    h5py = _h5py()
    folder = Path(path)
    trajectories = source.trajectories if isinstance(source, Dataset) else source
    if not len(trajectories):
        raise ValueError(f"There are no complete episodes to export in {source!r}.")
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists: export to a new or empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    about = trajectories.description
    writer = _EpisodeWriter(about.environment, compression)
    temporary = folder / (FILE + ".new")
    try:
        # The newest version of the file format needs far fewer bytes per array.
        with h5py.File(temporary, "w", track_order=True, libver="latest") as file:
            seeds = trajectories.seeds
            for number, trajectory in enumerate(trajectories):
                group = file.create_group(f"episode_{number}")
                group.attrs["id"] = number
                group.attrs["total_steps"] = len(trajectory)
                if seeds[number] is not None:
                    group.attrs["seed"] = seeds[number]
                writer.write(group, trajectory)
    except BaseException:
        temporary.unlink(missing_ok=True)  # So a second attempt finds an empty folder.
        raise
    metadata = {
        "dataset_id": dataset_id or _default_id(about.task),
        "minari_version": _MINARI_VERSION,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": len(trajectories),
        "total_steps": int(trajectories.lengths.sum()),
        "observation_space": json.dumps(_space(writer.observation_space)),
        "action_space": json.dumps(_space(writer.action_space)),
        "marl_collect": about.to_json(),
    }
    if env_spec is not None:
        metadata["env_spec"] = env_spec
    (folder / METADATA).write_text(json.dumps(metadata), encoding="utf-8")
    return temporary.rename(folder / FILE)


@final
class _EpisodeWriter:
    """Writes the episodes of one environment into groups of a file."""

    def __init__(self, environment: EnvDescription, compression: str | None) -> None:
        groups = environment.groups
        self._groups = list(groups)
        self._root = list(environment.root)
        self._compression = compression
        observed = {
            name: batch_space(group.observation, group.n_agents)
            for name, group in groups.items()
        }
        acting = {
            name: batch_space(stored_action(group), group.n_agents)
            for name, group in groups.items()
        }
        self.observation_space = spaces.Dict(observed | dict(environment.root))
        self.action_space = spaces.Dict(acting)

    def write(self, group: Any, trajectory: TensorDictBase) -> None:
        """Write one episode ``[T]``."""
        after = trajectory.get("next")
        for name in self._groups:
            own = (name, "observation")
            self._observe(group, name, trajectory[0].get(own), after.get(own))
            action = trajectory.get((name, "action"))
            self._store(group, f"actions/{name}", self.action_space[name], action)
        for name in self._root:
            self._observe(group, name, trajectory[0].get(name), after.get(name))
        rewards = [after.get((name, "reward")) for name in self._groups]
        team = sum(reward.double().sum((-2, -1)) for reward in rewards)
        self._array(group, "rewards", team)
        self._array(group, "terminations", after.get("terminated").flatten())
        self._array(group, "truncations", after.get("truncated").flatten())
        for name, reward in zip(self._groups, rewards, strict=True):
            self._array(group, f"infos/{name}/reward", _with_zero_first(reward))
            for key in _INFOS:
                later = after.get((name, key), None)
                if later is not None:
                    first = trajectory.get((name, key))[:1]
                    self._array(group, f"infos/{name}/{key}", torch.cat([first, later]))

    def _observe(self, group: Any, name: str, first: Any, later: Any) -> None:
        if later is None:
            raise KeyError(
                f"The dataset has no observations of {name} under 'next', so the last "
                "ones of episodes are missing: it was collected with "
                "compact_obs=True. Collect without that option to export."
            )
        whole = torch.cat([first.unsqueeze(0), later])
        space = self.observation_space[name]
        self._store(group, f"observations/{name}", space, whole)

    def _store(self, group: Any, where: str, space: Any, value: Any) -> None:
        if isinstance(space, spaces.Dict):
            for name, inner in space.spaces.items():
                self._store(group, f"{where}/{name}", inner, value.get(name))
        elif isinstance(space, spaces.Tuple):
            for index, inner in enumerate(space.spaces):
                at = f"{where}/_index_{index}"
                self._store(group, at, inner, value.get(str(index)))
        else:
            self._array(group, where, value, space.dtype)

    def _array(self, group: Any, where: str, value: Any, dtype: Any = None) -> None:
        data = value.numpy() if dtype is None else value.numpy().astype(dtype)
        small = data.nbytes < _CHUNKED_FROM
        group.create_dataset(
            where,
            data=data,
            compression=None if small else self._compression,
            dcpl=_compact() if small else None,
        )


def _with_zero_first(rewards: torch.Tensor) -> torch.Tensor:
    """Return ``[T, n, 1]`` as ``[T + 1, n]``, with zeros for the reset."""
    return torch.cat([torch.zeros_like(rewards[:1]), rewards]).squeeze(-1)


def _default_id(task: str) -> str:
    name = re.sub(r"\W+", "_", task)
    return f"marl_collect/{name}-v0"


def _space(space: Any) -> dict[str, Any]:
    """Return a space in Minari's JSON format."""
    about: dict[str, Any] = {"type": type(space).__name__}
    if isinstance(space, spaces.Dict):
        return about | {"subspaces": {k: _space(s) for k, s in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return about | {"subspaces": [_space(s) for s in space.spaces]}
    if isinstance(space, spaces.MultiBinary):
        return about | {"n": list(space.shape)}
    about["dtype"] = str(space.dtype)
    if isinstance(space, spaces.Discrete):
        return about | {"start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        return about | {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
    return about | {"shape": list(space.shape)} | bounds


def _compact() -> Any:
    """Return the setting that stores an array inside its header."""
    h5py = _h5py()
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.COMPACT)
    return settings


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "Exporting to HDF5 needs h5py, which is not installed: "
            'pip install "marl-collect[hdf5]"'
        ) from error
    return h5py
