"""The parts of networks: layers that hold one set of weights per agent."""
