"""What an update leaves to read: its record, logged numbers, metrics, use of the device."""
