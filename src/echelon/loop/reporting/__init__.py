"""Who is told of a run while it trains."""
