"""Environments and checks for tests. Worker processes can import all of them.

``check_env`` validates an environment against the contract. ``CountingEnv`` produces
numbers that a test can recompute. ``PairEnv`` has a known optimum.
"""
