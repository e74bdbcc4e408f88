"""A real Slurm of several nodes on one machine, for tests: see README.md."""

from .cluster import Cluster

__all__ = ["Cluster"]
