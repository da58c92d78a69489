"""Calls that open or change files, counted: something happens in place of a chosen one."""

import errno
import os


class Killed(BaseException):
    """Stands for a kill: no later file call takes place, not even one that tidies up."""


class FileCalls:
    """Counts file calls; the chosen one, and for a kill all after it, do what `instead` does."""

    CALLS = ("open", "fsync", "replace", "rename", "unlink", "mkdir", "truncate")

    def __init__(self, monkeypatch, which=None, instead=None):
        self.count, self.which, self.instead = 0, which, instead
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        monkeypatch.setattr("io.open", self._wrapped(open))

    def _wrapped(self, call):
        def counted(*arguments, **options):
            self.count += 1
            if self.which is not None and (
                self.count == self.which or (self.instead is kill and self.count > self.which)
            ):
                self.instead()
            return call(*arguments, **options)

        return counted


def kill():
    """Stop like a killed process, which does nothing more."""
    raise Killed


def end_process():
    """End the process, which was forked for it."""
    os._exit(9)


def disk_full():
    """Make the call fail, but not those after it."""
    raise OSError(errno.ENOSPC, "No space left on device")
