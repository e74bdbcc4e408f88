"""Models sharded over the data-parallel ranks: `fully_shard`."""
