"""How processes communicate: ranks through the environment, runs through a folder, events through lines in files.

Nothing here imports torch, so a login node can read a run in a fraction of a second.
"""
