"""Numbers that are none: noticed before they reach weights or queue, and kept to look at."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from hardmix.methods.base import Method, NonFiniteError
from hardmix.runtime.atomic_files import write_atomically
from hardmix.runtime.distributed import rank

MOST_SKIPPED = 20
"""Steps in a row that train.on_nan=skip skips: beyond, the run has diverged."""
MOST_KEPT = 3
"""Folders nan-step-N of a run: each holds a whole state."""


def check_gradients(loss: Float[Tensor, ""], parameters: Iterable[nn.Parameter]) -> None:
    """Refuse gradients that are no numbers: averaged over ranks, they are the same on each.

    On a GPU this waits for the device once a step, as the loss's own checks do.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    lengths = torch.stack(torch._foreach_norm(gradients))
    if not bool(lengths.isfinite().all()):
        raise NonFiniteError(f"gradients hold NaN or infinity (loss {float(loss):.4g})")


class BatchNormSnapshot:
    """Batch norm's running statistics before a step, to undo what a broken batch did to them."""

    def __init__(self, method: Method) -> None:
        kept = set(map(id, method.replicated().values()))  # a step does not change these in time
        self._buffers = [buffer for buffer in method.buffers() if id(buffer) not in kept]
        self._copies = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def note(self) -> None:
        """Remember them as they are."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring them back."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)


def likely_reasons(lr: float, bf16: bool) -> str:
    """What to try."""
    reasons = [f"a learning rate that is too high (optimizer.lr={lr:g})"]
    if bf16:
        reasons.append("bfloat16 (try --train.precision fp32)")
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
