"""VMAS, a simulator of many worlds."""
