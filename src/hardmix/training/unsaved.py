"""What is said where results cannot be written: once, with what is kept and the way out."""

import shlex

from hardmix.errors import OutputError
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, warn

GONE = 9
"""What rank 0 asks of all where the run's folder is not in its place: above all else."""


class Saved:
    """What of a run is on disk. Only rank 0 knows."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Of the newest checkpoint."""
        self.reason: str | None = None
        """Why the last one could not be written; None where it was."""

    def note(self, step: int) -> None:
        """A checkpoint was written."""
        if self.reason is not None:
            say(f"Checkpoints can be written again: the one of step {step} is.")
        self.step, self.reason = step, None

    def note_failure(self, step: int, error: OSError) -> None:
        """A checkpoint could not be written: said the first time only."""
        if self.step == step:
            return  # it is there, from before
        if self.reason is None:
            warn(
                f"no checkpoint at step {step} ({error.strerror}): {error.filename}. {self.kept}"
                " Training continues and tries again at each further checkpoint, without saying so."
            )
        self.reason = error.strerror or type(error).__name__

    @property
    def kept(self) -> str:
        """In a sentence."""
        if self.step is None:
            return "No checkpoint was written before."
        return f"The checkpoint of step {self.step} is kept."

    def lost_stop(self, run: Run, step: int) -> str:
        """How a run ends that was asked to stop and could not be saved; empty where it was."""
        if self.reason is None:
            return ""
        return (
            f"the checkpoint of step {step} could not be written ({self.reason}). {self.kept}"
            f" {_way_out(run, self.step)}"
        )

    def lost_end(self, run: Run, summarized: bool) -> str:
        """What a finished run lacks beside its encoder; empty where nothing."""
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
    """End, on all ranks, where one has found `GONE`."""
    if wanted == GONE:
        raise OutputError(
            f"{run.path} was moved, deleted or replaced during training: nothing can be written"
            f" after step {step}. hardmix pretrain --out FOLDER --resume, with the folder's new"
            " place, continues from its newest checkpoint."
        )


def _way_out(run: Run, step: int | None) -> str:
    command = f"hardmix pretrain --out {shlex.quote(str(run.path))} --resume"
    where = "starts again from the beginning" if step is None else f"continues from step {step}"
    return f"Make room, then {command} {where}."
