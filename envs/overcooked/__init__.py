"""Overcooked-AI's kitchens."""
