"""TorchTNT's modules by their names there: `echelon.compat.torchtnt` for `torchtnt`. docs/moving/torchtnt.md says what differs."""
