"""What an update leaves to read: its record, logged numbers, use of the device, times and traces; and who is told."""
