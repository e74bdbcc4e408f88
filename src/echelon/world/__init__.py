"""This rank: its group, device and RNGs, and how ranks agree."""
