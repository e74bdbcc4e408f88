"""FairScale's names: `from fairscale.x import y` becomes `from echelon.compat.fairscale.x import y`. See docs/migrating.md."""
