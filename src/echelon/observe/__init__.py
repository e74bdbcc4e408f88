"""Turn events and numbers into answers for people. Reads the run folder only; imports without torch."""
