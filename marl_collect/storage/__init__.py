"""Datasets on disk: Parquet files, and a cache of decoded frames that is mapped.

Read ``description.py`` (what a dataset is of), ``files.py`` (names, listing and durable
writing), ``columns.py`` (a frame's keys as columns of a table, and back), ``cache.py``
(decoded frames and the table of episodes), ``frames.py`` (read by number),
``trajectories.py`` and ``dataset.py``. Writing is in ``episodes.py``, ``writer.py`` and
``recording.py``.

``docs/storage.md`` says how to use it.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.errors import DatasetError as DatasetError
    from marl_collect.storage.copying import copy as copy
    from marl_collect.storage.dataset import Dataset as Dataset
    from marl_collect.storage.dataset import open_dataset as open_dataset
    from marl_collect.storage.description import (
        DatasetDescription as DatasetDescription,
    )
    from marl_collect.storage.description import RunDescription as RunDescription
    from marl_collect.storage.episodes import EndedEpisode as EndedEpisode
    from marl_collect.storage.frames import Transitions as Transitions
    from marl_collect.storage.loading import Loader as Loader
    from marl_collect.storage.minari import export_minari as export_minari
    from marl_collect.storage.recording import BackgroundWriter as BackgroundWriter
    from marl_collect.storage.recording import record as record
    from marl_collect.storage.statistics import Moments as Moments
    from marl_collect.storage.trajectories import Trajectories as Trajectories
    from marl_collect.storage.vault import import_vault as import_vault
    from marl_collect.storage.writer import Writer as Writer

__getattr__, __dir__ = lazy.attach(__name__)
