"""What a user did wrong, said once and without a traceback.

A message names the setting, its value, the limit and the way out.
"""


class InputError(ValueError):
    """Bad input: the command line prints the message alone and exits with status 2."""


class LockedError(InputError):
    """Another process writes to the folder."""


class UnfinishedError(Exception):
    """The run stopped before its end and can go on with --resume: exit status 75."""
