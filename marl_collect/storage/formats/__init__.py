"""The formats that datasets are exported to and imported from.

==================  ===========================================================
file                content
==================  ===========================================================
``table.py``        the table of formats
``registry.py``     ``Format``, ``export_dataset`` and ``import_dataset``
``blocks.py``       complete episodes between a dataset and a format
``hdf5.py``         one HDF5 file
``minari.py``       datasets of Minari
``huggingface.py``  Parquet files with a dataset card
``vault.py``        vaults of flashbax and OG-MARL, imported only
==================  ===========================================================
"""
