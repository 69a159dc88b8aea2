"""The runs of a sweep or study side by side on one machine: slots, a process per run, and a table of them."""
