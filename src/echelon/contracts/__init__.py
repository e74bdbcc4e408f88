"""What one process may tell another: ranks by the environment, runs by a folder, events by lines in files.

Nothing in here imports torch, so that a login node can read a run in a fraction of a second.
"""
