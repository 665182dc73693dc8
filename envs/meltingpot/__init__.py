"""MeltingPot substrates and scenarios."""
