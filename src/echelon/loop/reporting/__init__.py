"""Reports of a run while it trains: sinks, times, profiles."""
