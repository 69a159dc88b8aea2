"""From the runs of a study to its report."""
