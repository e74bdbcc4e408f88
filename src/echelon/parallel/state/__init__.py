"""The state of modules and optimizers by parameter name under any layout, and the partition of optimizers over ranks."""
