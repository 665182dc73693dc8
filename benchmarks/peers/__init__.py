"""Others' collectors and vectorisers, each at its best."""
