"""Exports complete episodes into Minari's local store."""

import os
import re
from pathlib import Path

from gymnasium.envs.registration import EnvSpec

from marl_collect.storage.dataset import Dataset
from marl_collect.storage.description import DatasetDescription
from marl_collect.storage.hdf5 import export_hdf5
from marl_collect.storage.selection import Trajectories

_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


def export_minari(
    source: Dataset | Trajectories,
    path: str | Path,
    *,
    compression: str | None = "gzip",
) -> Path:
    """Write complete episodes to Minari's local store.

    ``minari.list_local_datasets()`` shows the dataset and ``minari.load_dataset(id)``
    opens it. The store is the folder ``$MINARI_DATASETS_PATH``, or
    ``~/.minari/datasets``. The content is that of ``export_hdf5``, with an ``env_spec``
    that has the name and the keyword arguments of the task.

    Args:
        source: a dataset, or a selection of its episodes.
        path: id of the new dataset, such as ``"mine/spread-v0"``.
        compression: as for ``export_hdf5``.

    Returns:
        The file.

    Raises:
        ValueError: if the id is malformed, or there are no episodes.
        FileExistsError: if the store has a dataset with this id.
    """
    dataset_id = Path(path).as_posix()
    if not _ID.fullmatch(dataset_id):
        raise ValueError(
            f"{dataset_id!r} is not an id of a Minari dataset: use a name with a "
            "version, such as mine/spread-v0."
        )
    trajectories = source.trajectories if isinstance(source, Dataset) else source
    root = os.environ.get("MINARI_DATASETS_PATH")
    store = Path(root) if root else Path.home() / ".minari" / "datasets"
    return export_hdf5(
        trajectories,
        store / dataset_id / "data",
        dataset_id=dataset_id,
        compression=compression,
        env_spec=env_spec(trajectories.description),
    )


def env_spec(about: DatasetDescription) -> str:
    """Return Gymnasium's description of a task as JSON; it builds no environment."""
    name = re.sub(r"[^\w:.-]+", "_", about.task)
    return EnvSpec(id=name, kwargs=dict(about.env_kwargs)).to_json()
