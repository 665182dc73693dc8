"""What is stepped, and who acts.

``table.py``, ``free.py`` and ``burning.py`` are imported in the peers'
environments too, where neither torch nor what this package needs may be installed.
"""
