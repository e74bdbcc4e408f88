"""This rank: its group, its device, its RNGs, and how ranks agree."""
