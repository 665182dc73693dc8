"""Environments and checks for tests. Worker processes can import all of them.

``check_env`` validates an environment against the contract. ``CountingEnv`` produces
numbers that a test can recompute. ``FreeEnv`` costs almost nothing to step. ``PairEnv``
has a known optimum. ``zoo.py`` has PettingZoo environments that follow a script.
``equality.compare`` steps two environments and compares their results.
"""
