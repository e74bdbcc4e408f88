"""Sinks observe a run: they get events and records, and show or keep them. Code that acts on a run is a callback."""
