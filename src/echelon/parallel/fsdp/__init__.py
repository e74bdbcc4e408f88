"""Models split over the ranks that have other samples: `fully_shard`."""
