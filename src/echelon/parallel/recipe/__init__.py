"""What happens to a module besides being made parallel: recomputed, compiled, computed in another precision."""
