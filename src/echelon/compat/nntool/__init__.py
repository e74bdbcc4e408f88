"""nntool's module for Slurm by its name there: `echelon.compat.nntool.slurm` for `nntool.slurm`."""
