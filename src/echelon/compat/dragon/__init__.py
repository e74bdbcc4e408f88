"""Dragon's modules for training by their names there: `echelon.compat.dragon` for `dragon`, with its runtime or without it."""
