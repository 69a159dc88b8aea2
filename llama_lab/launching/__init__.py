"""Trains the runs of a sweep or study side by side: on slots of this machine, as Slurm jobs, or as Ray tasks."""
