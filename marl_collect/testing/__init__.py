"""Environments to test collectors and adapters on; importable by workers.

``counting.py`` has an environment whose every number can be recomputed, ``free.py``
one that costs nothing, ``zoo.py`` scripted PettingZoo environments, ``harms.py`` what
can go wrong in one, ``equality.py`` the comparison of two.
"""
