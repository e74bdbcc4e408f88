"""What `echelon doctor` has every rank measure: facts of its host, then what ranks do together. It judges nothing."""
