"""nntool's module for Slurm, under its name: `echelon.compat.nntool.slurm` replaces `nntool.slurm`."""
