"""Recurrent networks, and the module that applies them to TensorDicts."""
