"""Jobs on a Slurm cluster: one batch script that a person can read, kept in the run's folder."""
