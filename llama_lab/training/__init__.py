"""Training of one run: Lightning module, optimizers, schedules, callbacks, loggers."""
