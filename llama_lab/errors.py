"""The one exception that is meant for users."""


class ConfigError(ValueError):
    """A setting that cannot work: one line naming the key, its value and the fix.

    The command line prints the message without a traceback and exits with status 2.
    """


class FinishedRunError(ConfigError):
    """The run that was asked for is there already, with the same settings. A sweep passes over it."""
