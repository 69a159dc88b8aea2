"""The hardware of a run: what it has, how runs share it, and how fast they are on it."""
