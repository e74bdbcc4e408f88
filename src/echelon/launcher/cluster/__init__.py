"""Submitted jobs: on Slurm, in this machine's background; from a script or a function."""
