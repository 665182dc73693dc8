"""Micro-benchmarks: alternatives within one process, as ``micro.py`` measures them.

A module has ``cases()``, which returns the rows of its table; its docstring says what
it compares. It is imported when it is measured, so its libraries are optional.
"""
