"""Modules built on the meta device, which get their values after they are sharded."""
