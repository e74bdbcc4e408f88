"""`dragon.ai`."""
