"""Training: units define a step, the loops run the steps, callbacks act on the run."""
