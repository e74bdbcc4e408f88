"""Sequences cut over ranks."""
