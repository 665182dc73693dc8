"""Datasets as Parquet files, and a cache of decoded frames.

==============  ===============================================================
file            content
==============  ===============================================================
``columns.py``  a frame's keys as columns of a table, and back
``files.py``    names, listing and durable writing of files
``tracker.py``  numbers frames within episodes, finds episodes that end
``writer.py``   adds batches to a folder, joins small files
``cache.py``    decoded frames and the table of episodes, mapped by readers
``frames.py``   reads frames and episodes by their numbers
==============  ===============================================================

It will replace the format of the modules above it. Nothing outside of this folder uses
it yet.
"""
