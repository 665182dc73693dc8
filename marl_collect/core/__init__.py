"""The contract between environments and the code that collects from them.

Holds groups, spaces and keys, done flags, ``MultiAgentEnv``, ``EnvBatch`` and the
TensorDict methods on top of it, factories, seeds, replay and random actions. Imports no
other sub-package.
"""
