"""This package under measurement, as its users drive it: ``collectors.py``."""
