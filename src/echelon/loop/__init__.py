"""The story of training: units say what a step is, the loops run them, callbacks act on them."""
