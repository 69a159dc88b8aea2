"""Studies: designed sets of runs, and the evidence that they give."""
