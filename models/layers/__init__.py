"""Building blocks of networks: layers with one set of weights per agent."""
