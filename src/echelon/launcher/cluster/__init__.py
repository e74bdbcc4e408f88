"""Submitted jobs: on Slurm, on Kubernetes, in this machine's background; from a script or a function."""
