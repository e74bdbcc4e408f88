"""Sinks watch: they are given events and records and show or keep them. What acts on a run is a callback."""
