"""TorchTNT's modules by their names: `echelon.compat.torchtnt` for `torchtnt`. docs/moving/torchtnt.md says what differs."""
