"""Errors that are reported in one message, without a traceback.

A message names the setting, its value, the limit and the way out. `status` is the exit status of
the command that ends with the error.
"""


class InputError(ValueError):
    """Bad input: the command line prints only the message and exits with status 2."""

    status = 2


class UnnamedCodeError(InputError):
    """A file asks for code or a command that the user has not named in this call."""

    def __init__(self, name: str, setting: str, where: str) -> None:
        self.name, self.setting = name, setting
        self.asks = (
            f"{where} asks for {setting}={name!r}, which is code to be run, and hardmix runs only"
            " what you name yourself"
        )
        super().__init__(f"{self.asks}: if you trust it, call hardmix.allow_code({name!r}) first.")


class LockedError(InputError):
    """Another process is writing to the folder."""


class OutputError(Exception):
    """Results could not be written, as on a full disk; exit status 74. Says what is kept."""

    status = 74


class UnfinishedError(Exception):
    """The run stopped before its end and can be resumed; exit status 75."""

    status = 75

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback: the message alone."""
        return [str(self)]
