"""Turn events and numbers into answers for people. Reads only the run folder; imports no torch."""
