"""Layers and sequences split over ranks that have the same samples."""
