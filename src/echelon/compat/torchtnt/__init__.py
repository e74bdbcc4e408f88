"""TorchTNT's modules by their names there: `echelon.compat.torchtnt` for `torchtnt`. docs/migrating.md says what differs."""
