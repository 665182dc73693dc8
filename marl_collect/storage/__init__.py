"""Experience on disk: folders of complete batches that open without being read.

========================  =====================================================
file                      its one job
========================  =====================================================
``writer.py``             adds batches to a dataset; survives any end
``background.py``         does so in a thread, while the next batch is collected
``whole.py``              passes on whole episodes only
``recording.py``          from factories to a dataset, in one call
``dataset.py``            opens a dataset as a list of TensorDicts
``selection.py``          its episodes: read, drawn, filtered, split by return
``transitions.py``        its frames, to draw from
``spans.py``              where frames stand, and copying them
``mapping.py``            maps of the files
``hdf5.py``               exports episodes to HDF5
``episodes.py``           finds the episodes in batches
``description.py``        what a dataset says about itself
``index.py``              the file that lists what is complete
``spaces.py``             spaces as JSON
``checks.py``             checks of files before anything is read by what they say
``files.py``              atomic and durable changes to the file system, locks
========================  =====================================================

The format is written down in ``docs/storage.md``.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.storage.background import BackgroundWriter as BackgroundWriter
    from marl_collect.storage.checks import DatasetError as DatasetError
    from marl_collect.storage.dataset import Dataset as Dataset
    from marl_collect.storage.dataset import open_dataset as open_dataset
    from marl_collect.storage.description import (
        DatasetDescription as DatasetDescription,
    )
    from marl_collect.storage.description import RunDescription as RunDescription
    from marl_collect.storage.episodes import EndedEpisode as EndedEpisode
    from marl_collect.storage.hdf5 import export_hdf5 as export_hdf5
    from marl_collect.storage.recording import record as record
    from marl_collect.storage.selection import Trajectories as Trajectories
    from marl_collect.storage.transitions import Transitions as Transitions
    from marl_collect.storage.whole import EpisodeWriter as EpisodeWriter
    from marl_collect.storage.writer import Writer as Writer

__getattr__, __dir__ = lazy.attach(__name__)
