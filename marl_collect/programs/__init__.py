"""What programs around the collectors share.

Ctrl-C, environments by name, and text for terminals and notebooks. Imports no other
room. The engine uses only the tables for notebooks.
"""
