"""Environments and checks for tests. Workers can import all of it.

``check_env`` validates any environment against the contract. ``CountingEnv`` produces
numbers that a test can recompute, ``FreeEnv`` costs nothing to step, ``PairEnv`` has a
known optimum, and ``zoo.py`` scripts PettingZoo environments. ``equality.compare``
steps two environments side by side.
"""
