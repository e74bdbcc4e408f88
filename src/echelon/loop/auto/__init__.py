"""The unit that needs a loss and an optimizer."""
