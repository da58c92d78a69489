"""What a user did wrong or a machine could not do, said once and without a traceback.

A message names the setting, its value, the limit and the way out. `status` is the exit status of
the command that the error ends.
"""


class InputError(ValueError):
    """Bad input: the command line prints the message alone and exits with status 2."""

    status = 2


class LockedError(InputError):
    """Another process writes to the folder."""


class OutputError(Exception):
    """Results could not be written, as on a full disk; says what is kept: exit status 74."""

    status = 74


class UnfinishedError(Exception):
    """The run stopped before its end and can be continued with --resume: exit status 75."""

    status = 75
