"""Modules built without memory, and given their values once they are laid out."""
