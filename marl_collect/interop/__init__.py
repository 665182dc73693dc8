"""Bridges to other libraries; importing one needs that library.

``torchrl.py`` has all that is public for TorchRL: our environments as TorchRL's, and
TorchRL's as ours. The files ``torchrl_*.py`` are its parts.
"""
