"""`dragon.infrastructure`."""
