"""Submitted jobs, on Slurm or in this machine's background, of a script or a function."""
