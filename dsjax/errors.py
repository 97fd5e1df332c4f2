"""The errors that are the user's to mend.

Every message says what was found, what was expected and what to do. The command line prints a `UserError` without a
traceback; any other exception is a fault of the program and keeps its traceback.
"""


class UserError(ValueError):
    """Something the user gave (a flag, a file, a request) cannot be used as it is."""


class ConfigError(UserError):
    """A model configuration that is unknown, incomplete, or contradicts itself. The message names the field."""
