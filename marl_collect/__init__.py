"""Multi-agent data collection for PyTorch, at the speed of the environments."""
