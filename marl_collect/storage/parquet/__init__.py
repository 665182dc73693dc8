"""Datasets as Parquet files, and a cache of decoded frames.

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
``trajectories.py``     its episodes: read, sample, filter, split by return
``windows.py``          parts of episodes: sequences, n-step transitions
``saving.py``           some of the episodes as another dataset
``moments.py``          mean and standard deviation of keys
``statistics.py``       returns, lengths and ranges of values
``card.py``             a description of the dataset in Markdown
``copying.py``          ``copy``: between folders and object stores
``numbering.py``        numbers of frames and of items
======================  =======================================================

The public names of ``marl_collect.storage`` will be these, and the modules of the
format before it go.
"""
