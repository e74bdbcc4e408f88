"""`dragon.native`."""
