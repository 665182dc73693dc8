"""The contract between environments and everything that collects from them.

Groups, spaces and keys (``description.py``, ``groups.py``), flags, the environment base
class ``MultiAgentEnv`` and the protocol of a batch of environments, the TensorDict
methods that people call, factories, seeds, replay and random actions. Imports no other
room of the package.
"""
