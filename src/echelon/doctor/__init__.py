"""Turns the ranks' reports into the table of `echelon doctor`: pure functions from values to rows."""
