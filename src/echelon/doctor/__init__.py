"""What `echelon doctor` makes of what ranks told: pure, from values to rows of a table."""
