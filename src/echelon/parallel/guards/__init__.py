"""Guards: checks that all ranks do the same, which report the difference."""
