"""Whole models on every rank: DistributedDataParallel, DataParallel, local SGD, and checks of forward passes around them."""
