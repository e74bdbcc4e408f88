"""Changes of a module besides its layout: activation checkpointing, compilation, precision."""
