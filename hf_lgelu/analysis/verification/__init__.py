"""Local robustness: attack, bounds and search."""
