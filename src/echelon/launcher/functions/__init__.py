"""Functions and launch commands on ranks: a call goes there, and each rank's value comes back."""
