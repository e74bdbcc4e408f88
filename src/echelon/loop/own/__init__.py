"""A user's own training loop: `prepare` makes its parts parallel, `epochs` and `window` give it the guarantees of `train`."""
