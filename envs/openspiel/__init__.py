"""OpenSpiel's games."""
