"""Bridges to other libraries, one file each; importing one needs that library.

``torchrl.py``: our environments as TorchRL's, and TorchRL's as ours.
"""
