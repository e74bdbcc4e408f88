"""The measurements of `echelon doctor` on every rank: facts of its host, then communication between ranks. It judges nothing."""
