"""Groups of ranks with placement policies, on Dragon's runtime or without it."""
