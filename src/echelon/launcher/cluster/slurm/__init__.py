"""Jobs on a Slurm cluster: one readable batch script, kept in the run's folder."""
