"""Whole models on every rank: DistributedDataParallel, local SGD, and what they cannot see."""
