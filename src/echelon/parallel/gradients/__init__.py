"""Gradients of whole and sharded parameters: scaled, clipped, added in one order, reduced where a layout does not."""
