"""Adapters between this package and other libraries, which must be installed.

``torchrl.py`` is the public interface for TorchRL: it converts environments in both
directions. The files ``torchrl_*.py`` implement it. ``benchmarl.py`` has BenchMARL's
experiments on our collectors, ``loggers.py`` TorchRL's loggers for training runs.
"""
