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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_collect.storage.background import BackgroundWriter
    from marl_collect.storage.checks import DatasetError
    from marl_collect.storage.dataset import Dataset, open_dataset
    from marl_collect.storage.description import DatasetDescription, RunDescription
    from marl_collect.storage.episodes import EndedEpisode
    from marl_collect.storage.hdf5 import export_hdf5
    from marl_collect.storage.recording import record
    from marl_collect.storage.selection import Trajectories
    from marl_collect.storage.transitions import Transitions
    from marl_collect.storage.whole import EpisodeWriter
    from marl_collect.storage.writer import Writer

_MODULES = {
    "BackgroundWriter": "background",
    "Dataset": "dataset",
    "DatasetError": "checks",
    "DatasetDescription": "description",
    "EndedEpisode": "episodes",
    "EpisodeWriter": "whole",
    "RunDescription": "description",
    "Trajectories": "selection",
    "Transitions": "transitions",
    "Writer": "writer",
    "export_hdf5": "hdf5",
    "open_dataset": "dataset",
    "record": "recording",
}

__all__ = [
    "BackgroundWriter",
    "Dataset",
    "DatasetDescription",
    "DatasetError",
    "EndedEpisode",
    "EpisodeWriter",
    "RunDescription",
    "Trajectories",
    "Transitions",
    "Writer",
    "export_hdf5",
    "open_dataset",
    "record",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
