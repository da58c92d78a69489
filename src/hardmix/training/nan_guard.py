"""NaN and infinity: noticed before they reach weights or queue, undone, and kept to look at.

One check a step, of the gradients, which are those of all ranks: a NaN in a loss, a query or a key
reaches them. Its verdict stays on the device, where the optimizer acts on it. A CPU reads it at
once; a GPU is asked a step later, when it has long been there, and what the step had changed
besides is brought back then.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from hardmix.data.batches import Batch
from hardmix.methods.base import Method
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.device import Late
from hardmix.runtime.distributed import rank

MOST_SKIPPED = 20
"""Steps in a row that train.on_nan=skip skips: beyond, the run has diverged."""
MOST_KEPT = 3
"""Folders nan-step-N of a run: each holds a whole state."""


@torch.no_grad()
def gradients_broken(gradients: list[Tensor]) -> Float[Tensor, ""]:
    """1 where a gradient is NaN or infinite, else 0; averaged over ranks, the same on each."""
    lengths = torch.stack(torch._foreach_norm(gradients))
    return 1 - lengths.isfinite().all().float()


def judged_late(device: torch.device) -> bool:
    """Whether a step's verdict is read a step later: on a GPU, which would be waited for."""
    return device.type != "cpu"


class PendingStep(NamedTuple):
    """A step whose verdict has not been read."""

    step: int
    batch: Batch
    loss: Float[Tensor, ""]
    verdict: Late
    """1 where gradients were broken, and the loss."""


class StepSnapshot:
    """What a step changes and the optimizer does not own, as it was before: to undo the step.

    That is batch norm's statistics and what follows by momentum; where the verdict comes a step
    late, also what was written after the step, and then the last two states are kept.
    """

    def __init__(self, method: Method, trained: Iterable[nn.Parameter], late: bool) -> None:
        passed_over = set(map(id, trained))
        if not late:
            passed_over |= set(map(id, method.replicated().values()))
        state = [*method.parameters(), *method.buffers()]
        state = [each.detach() for each in state if id(each) not in passed_over]
        groups: dict[Any, list[Tensor]] = {}
        for tensor in state:  # of one kind: a GPU copies them in one call
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._groups = list(groups.values())
        self._copies = [
            [[each.clone() for each in group] for group in self._groups] for _ in range(1 + late)
        ]
        own = nn.Module.get_extra_state
        self._numbers = [each for each in method.modules() if type(each).get_extra_state is not own]
        self._extra: list[list[Any]] = [[] for _ in range(1 + late)]

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Remember the state before this step."""
        slot = step % len(self._copies)
        for copies, group in zip(self._copies[slot], self._groups, strict=True):
            torch._foreach_copy_(copies, group)
        self._extra[slot] = [copy.deepcopy(each.get_extra_state()) for each in self._numbers]

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Bring back the state before this step."""
        slot = step % len(self._copies)
        for copies, group in zip(self._copies[slot], self._groups, strict=True):
            torch._foreach_copy_(group, copies)
        for each, extra in zip(self._numbers, self._extra[slot], strict=True):
            each.set_extra_state(extra)


def likely_reasons(lr: float, precision: str) -> str:
    """What to try."""
    reasons = [f"a learning rate that is too high (optimizer.lr={lr:g})"]
    if precision != "fp32":
        reasons.append(f"{precision} (try --train.precision fp32)")
    return ", ".join([*reasons, "images of one colour under batch normalisation, broken hardware"])


def keep_for_inspection(
    folder: Path, state: dict[str, Tensor], batch: dict[str, Tensor], facts: dict[str, Any]
) -> str:
    """RUN/nan-step-N: the state before the step, every rank's batch, facts; returns what to say.

    A folder for each of the first few; a disk without room does not matter here.
    """
    if len(list(folder.parent.glob("nan-step-*"))) >= MOST_KEPT and not folder.exists():
        return f"nothing kept: {MOST_KEPT} folders nan-step-N are there already"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"batch-of-rank-{rank()}.safetensors").write_bytes(save(_copies(batch)))
        write_atomically(folder / "state.safetensors", save(_copies(state)))
        write_atomically(folder / "facts.json", json.dumps(facts, indent=2).encode())
    except OSError as error:
        return f"nothing kept in {folder}: {error.strerror}"
    return f"state and batch are in {folder}"


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, and no two in the same memory: with one view the key is the query."""
    return {
        name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }


def some(names: Sequence[str], number: int = 5) -> str:
    """The first few, for messages."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" * (len(names) > number))
