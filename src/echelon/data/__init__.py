"""Which rank sees which sample, in which order, and where to resume."""
