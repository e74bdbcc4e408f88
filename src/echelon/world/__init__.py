"""This rank: its group, its device, its random streams, and how ranks agree."""
