"""Level-based foraging (LBF)."""
