"""The table of formats. To add one, write a file with a ``FORMAT`` and add a line."""

from typing import Final

FORMATS: Final = {
    "hdf5": "marl_collect.storage.formats.hdf5",
    "minari": "marl_collect.storage.formats.minari",
    "huggingface": "marl_collect.storage.formats.huggingface",
    "vault": "marl_collect.storage.formats.vault",
}
"""The module of each format, imported when the format is used."""
