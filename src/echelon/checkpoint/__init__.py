"""A sequence of committed states in a folder. Knows neither units nor strategies, only names and what can be saved."""
