"""Callbacks that come with the library."""
