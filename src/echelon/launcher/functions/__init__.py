"""Functions and launch commands on ranks: a call goes there, each rank's value comes back."""
