"""Training as a call in a script, which continues afterwards."""
