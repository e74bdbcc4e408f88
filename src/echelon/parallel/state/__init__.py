"""The state of modules and optimizers by parameter name, whatever the layout; what is whole and what a rank holds of it."""
