"""AutoUnit, the unit that needs only a loss and an optimizer."""
