"""Experience on disk: folders of complete batches that open without being read.

========================  =====================================================
file                      its one job
========================  =====================================================
``writer.py``             adds batches to a dataset; survives any end
``background.py``         does so in a thread, while the next batch is collected
``dataset.py``            opens a dataset as a list of TensorDicts
``episodes.py``           finds the episodes in batches
``description.py``        what a dataset says about itself
``index.py``              the file that lists what is complete
``spaces.py``             spaces as JSON
``files.py``              atomic and durable changes to the file system
========================  =====================================================

The format is written down in ``docs/storage.md``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_collect.storage.background import BackgroundWriter
    from marl_collect.storage.dataset import Dataset, open_dataset
    from marl_collect.storage.description import DatasetDescription, RunDescription
    from marl_collect.storage.episodes import EndedEpisode
    from marl_collect.storage.writer import Writer

_MODULES = {
    "BackgroundWriter": "background",
    "Dataset": "dataset",
    "DatasetDescription": "description",
    "EndedEpisode": "episodes",
    "RunDescription": "description",
    "Writer": "writer",
    "open_dataset": "dataset",
}

__all__ = [
    "BackgroundWriter",
    "Dataset",
    "DatasetDescription",
    "EndedEpisode",
    "RunDescription",
    "Writer",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
