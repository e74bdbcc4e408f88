"""Names of other systems, on echelon's core: a program moves by changing its import lines. Nothing in the core imports this."""
