"""Gradients of whole and sharded parameters: scaled, clipped, summed in a fixed order, reduced where the layout does not."""
