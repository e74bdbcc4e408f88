"""A training called from a script that goes on afterwards."""
