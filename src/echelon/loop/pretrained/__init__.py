"""Weights that were trained before, into whichever layout, and out of it."""
