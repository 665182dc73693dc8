"""Datasets on disk: Parquet files, and a cache of decoded frames that is mapped.

======================  =======================================================
file                    content
======================  =======================================================
``columns.py``          a frame's keys as columns of a table, and back
``files.py``            names, listing and durable writing of files
``writer.py``           ``Writer``: adds batches to a folder, joins small files
``episodes.py``         numbers frames within episodes, finds those that end
``episode_writer.py``   ``EpisodeWriter``: writes complete episodes only
``recording.py``        ``record``: collects, and writes in a thread meanwhile
``cache.py``            decoded frames and the table of episodes, mapped by readers
``frames.py``           reads frames by their numbers
``dataset.py``          ``open_dataset``, ``Dataset``
``transitions.py``      its frames
``trajectories.py``     its episodes: read, sample, filter, split by return, save
``windows.py``          parts of episodes: sequences, n-step transitions
``loading.py``          mini-batches for training
``statistics.py``       returns, lengths, ranges and moments of values
``description.py``      descriptions of a dataset and of its runs
``card.py``             a description of the dataset in Markdown
``copying.py``          ``copy``: between folders and object stores
``minari.py``           ``export_minari``: to Minari's local store
``vault.py``            ``import_vault``: from flashbax and OG-MARL
``checks.py``           errors that name the file
======================  =======================================================

``docs/storage.md`` says how to use it.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.storage.checks import DatasetError as DatasetError
    from marl_collect.storage.copying import copy as copy
    from marl_collect.storage.dataset import Dataset as Dataset
    from marl_collect.storage.dataset import open_dataset as open_dataset
    from marl_collect.storage.description import (
        DatasetDescription as DatasetDescription,
    )
    from marl_collect.storage.description import RunDescription as RunDescription
    from marl_collect.storage.episode_writer import (
        EpisodeWriter as EpisodeWriter,
    )
    from marl_collect.storage.episodes import EndedEpisode as EndedEpisode
    from marl_collect.storage.loading import Loader as Loader
    from marl_collect.storage.minari import export_minari as export_minari
    from marl_collect.storage.recording import (
        BackgroundWriter as BackgroundWriter,
    )
    from marl_collect.storage.recording import record as record
    from marl_collect.storage.statistics import Moments as Moments
    from marl_collect.storage.statistics import Statistics as Statistics
    from marl_collect.storage.trajectories import Trajectories as Trajectories
    from marl_collect.storage.transitions import Transitions as Transitions
    from marl_collect.storage.vault import import_vault as import_vault
    from marl_collect.storage.writer import Writer as Writer

__getattr__, __dir__ = lazy.attach(__name__)
