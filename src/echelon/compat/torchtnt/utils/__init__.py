"""torchtnt.utils."""
