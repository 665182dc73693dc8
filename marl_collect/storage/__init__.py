"""Datasets on disk: an append-only journal, and data files that are mapped.

========================  =====================================================
file                      content
========================  =====================================================
``recording.py``          ``record``: collects, and writes in a thread meanwhile
``writer.py``             ``Writer``: adds batches to a dataset
``episode_writer.py``     ``EpisodeWriter``: writes complete episodes only
``episodes.py``           finds episodes in batches
``appending.py``          appends so that a crash loses nothing
``dataset.py``            opens a dataset as a list of TensorDicts
``selection.py``          its episodes: read, sample, filter, split by return
``transitions.py``        its frames
``windows.py``            parts of episodes: sequences, n-step transitions
``loading.py``            mini-batches for training
``samples.py``            the TensorDicts that are read
``statistics.py``         its returns, lengths and ranges of values
``card.py``               a description of the dataset in Markdown
``rewriting.py``          ``save``: writes some of the episodes to a new dataset
``copying.py``            ``copy``: between folders and object stores
``minari.py``             ``export_minari``: to Minari's local store
``vault.py``              ``import_vault``: from flashbax and OG-MARL
``index.py``              the journal: description, runs, layouts, batches
``encoding.py``           encodes a batch
``records.py``            small keys: rows of bytes without constant bytes
``packed.py``             large frames, compressed one by one
``frames.py``             reads frames by their numbers
``spans.py``              consecutive frames
``remote.py``             folders in object stores
``description.py``        descriptions of a dataset and of its runs
``checks.py``             checks files before they are read
``files.py``              durable file changes, locks
========================  =====================================================

``docs/storage.md`` says how to use it.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.storage.checks import DatasetError as DatasetError
    from marl_collect.storage.description import (
        DatasetDescription as DatasetDescription,
    )
    from marl_collect.storage.description import RunDescription as RunDescription
    from marl_collect.storage.loading import Loader as Loader
    from marl_collect.storage.minari import export_minari as export_minari
    from marl_collect.storage.parquet.copying import copy as copy
    from marl_collect.storage.parquet.dataset import Dataset as Dataset
    from marl_collect.storage.parquet.dataset import open_dataset as open_dataset
    from marl_collect.storage.parquet.episode_writer import (
        EpisodeWriter as EpisodeWriter,
    )
    from marl_collect.storage.parquet.episodes import EndedEpisode as EndedEpisode
    from marl_collect.storage.parquet.moments import Moments as Moments
    from marl_collect.storage.parquet.recording import (
        BackgroundWriter as BackgroundWriter,
    )
    from marl_collect.storage.parquet.recording import record as record
    from marl_collect.storage.parquet.statistics import Statistics as Statistics
    from marl_collect.storage.parquet.trajectories import Trajectories as Trajectories
    from marl_collect.storage.parquet.transitions import Transitions as Transitions
    from marl_collect.storage.parquet.writer import Writer as Writer
    from marl_collect.storage.vault import import_vault as import_vault

__getattr__, __dir__ = lazy.attach(__name__)
