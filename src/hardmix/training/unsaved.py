"""Messages for results that cannot be written: what is kept, and what to do."""

import shlex

from hardmix.errors import OutputError
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, warn

GONE = 9
"""Request to end because the run's folder is gone; it outranks all other requests."""


class Saved:
    """Which checkpoint of a run is on disk; known to rank 0 only."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Step of the newest checkpoint."""
        self.reason: str | None = None
        """Why the last checkpoint could not be written; None if it was."""

    def note(self, step: int) -> None:
        """Record that a checkpoint was written."""
        if self.reason is not None:
            say(f"Checkpoints can be written again: saved step {step}.")
        self.step, self.reason = step, None

    def note_failure(self, step: int, error: OSError) -> None:
        """Record that a checkpoint could not be written; warn the first time only."""
        if self.step == step:
            return  # it is there, from before
        if self.reason is None:
            warn(
                f"no checkpoint at step {step} ({error.strerror}): {error.filename}. {self.kept}"
                " Training continues and retries at every checkpoint without saying so again."
            )
        self.reason = error.strerror or type(error).__name__

    @property
    def kept(self) -> str:
        """The checkpoint that is kept, as a sentence."""
        if self.step is None:
            return "There is no earlier checkpoint."
        return f"The checkpoint of step {self.step} is kept."

    def lost_stop(self, run: Run, step: int) -> str:
        """Return why a stopped run could not be saved; an empty string if it was."""
        if self.reason is None:
            return ""
        return (
            f"the checkpoint of step {step} could not be written ({self.reason}). {self.kept}"
            f" {_way_out(run, self.step)}"
        )

    def lost_end(self, run: Run, summarized: bool) -> str:
        """Return what a finished run could not write; an empty string if nothing is missing."""
        lacks = []
        if self.reason is not None:
            lacks.append(f"its last checkpoint ({self.reason})")
        if run.unwritten:
            lacks.append(f"the last {run.unwritten} lines of its logs")
        if not summarized:
            lacks.append("results/pretrain.json")
        if not lacks:
            return ""
        return (
            f"{run.encoder_file} is complete, but these could not be written: {', '.join(lacks)}."
            f" {self.kept} {_way_out(run, self.step)}"
        )


def end_if_gone(wanted: int, run: Run, step: int) -> None:
    """Raise OutputError on all ranks if one of them has asked for `GONE`."""
    if wanted == GONE:
        raise OutputError(
            f"{run.path} was moved, deleted or replaced during training: nothing can be written"
            f" after step {step}. hardmix pretrain --out FOLDER --resume, with the folder's new"
            " path, continues from its newest checkpoint."
        )


def _way_out(run: Run, step: int | None) -> str:
    command = f"hardmix pretrain --out {shlex.quote(str(run.path))} --resume"
    where = "starts again from the beginning" if step is None else f"continues from step {step}"
    return f"Make room, or repair the disk, then {command} {where}."
