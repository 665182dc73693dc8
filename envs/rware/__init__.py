"""The multi-robot warehouse (RWARE)."""
