"""The formats that datasets are exported to and imported from.

To add one, write a file with a ``FORMAT`` and add a line to ``FORMATS``.

==================  ===========================================================
file                content
==================  ===========================================================
``registry.py``     ``Format``, ``export_dataset`` and ``import_dataset``
``blocks.py``       complete episodes between a dataset and a format
``hdf5.py``         one HDF5 file
``minari.py``       datasets of Minari
``huggingface.py``  Parquet files with a dataset card
``vault.py``        vaults of flashbax and OG-MARL, imported only
==================  ===========================================================
"""

from typing import Final

FORMATS: Final = {
    "hdf5": "marl_collect.storage.formats.hdf5",
    "minari": "marl_collect.storage.formats.minari",
    "huggingface": "marl_collect.storage.formats.huggingface",
    "vault": "marl_collect.storage.formats.vault",
}
"""The module of each format, imported when the format is used."""
