"""Recurrent networks per agent, and the module that carries their state."""
