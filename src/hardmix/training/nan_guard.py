"""NaN and infinity: detected before they reach weights or queue, undone, kept for inspection.

Each step checks the gradients, averaged over all ranks: a NaN in a loss, a query or a key reaches
them. The verdict stays on the device, where the optimizer acts on it. On a CPU it is read at once;
on a GPU it is read a step later, so that nothing waits for it, and whatever else the step changed
is restored then.
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
"""Steps in a row that train.on_nan=skip skips; with more the run has diverged."""
MOST_KEPT = 3
"""Folders nan-step-N that a run keeps: each holds a complete state."""


@torch.no_grad()
def gradients_broken(gradients: list[Tensor]) -> Float[Tensor, ""]:
    """Return 1 if a gradient is NaN or infinite, else 0; the same on every rank."""
    lengths = torch.stack(torch._foreach_norm(gradients))
    return 1 - lengths.isfinite().all().float()


def judged_late(device: torch.device) -> bool:
    """Return whether a step's verdict is read a step later, as on a GPU, to avoid waiting."""
    return device.type != "cpu"


class PendingStep(NamedTuple):
    """A step whose verdict has not been read."""

    step: int
    batch: Batch
    loss: Float[Tensor, ""]
    verdict: Late
    """1 if gradients were NaN or infinite, else 0; the loss; with fp16, the loss scale."""


class StepSnapshot:
    """Copy of what a step changes besides the trained weights, used to undo the step.

    That is batch norm's statistics and momentum encoders. If the verdict is read a step later, it
    also includes what is written after the step, and the last two states are kept.
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
    """Return the likely causes of NaN, with what to try."""
    reasons = [f"a learning rate that is too high (optimizer.lr={lr:g})"]
    if precision != "fp32":
        reasons.append(f"{precision} (try train.precision=fp32)")
    return ", ".join([*reasons, "images of one colour under batch normalisation, broken hardware"])


def keep_for_inspection(
    folder: Path, state: dict[str, Tensor], batch: dict[str, Tensor], facts: dict[str, Any]
) -> str:
    """Write state, batches and facts to RUN/nan-step-N; return what to report.

    Only the first few broken steps are kept, and a full disk is not an error.
    """
    if len(list(folder.parent.glob("nan-step-*"))) >= MOST_KEPT and not folder.exists():
        return f"not kept: there are already {MOST_KEPT} folders nan-step-N"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"batch-of-rank-{rank()}.safetensors").write_bytes(save(_copies(batch)))
        write_atomically(folder / "state.safetensors", save(_copies(state)))
        write_atomically(folder / "facts.json", json.dumps(facts, indent=2).encode())
    except OSError as error:
        return f"state and batch could not be kept in {folder}: {error.strerror}"
    return f"state and batch are in {folder}"


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, and no two in the same memory: with one view the key is the query."""
    return {
        name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }


def some(names: Sequence[str], number: int = 5) -> str:
    """Return the first few names as text for a message."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" * (len(names) > number))
