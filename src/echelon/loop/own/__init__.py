"""A training loop of one's own: `prepare` makes its parts parallel, `epochs` and `window` keep what the units' loop keeps."""
