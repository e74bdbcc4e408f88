"""Numbers of a run: records of updates, logged numbers, metrics, use of the device."""
