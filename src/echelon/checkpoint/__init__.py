"""A sequence of committed states in a folder. Knows neither units nor layouts, only names and what can be saved."""
