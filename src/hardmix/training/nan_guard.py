"""NaN and infinity: detected before they reach weights or queue, undone, kept for inspection.

Each step checks the gradients, averaged over all ranks: a NaN in a loss, a query or a key reaches
them. The verdict stays on the device, where the optimizer acts on it. On a CPU it is read at once;
on a GPU it is read a step later, so that nothing waits for it, and whatever else the step changed
is restored then.

With train.precision=fp16, the loss is scaled so that small gradients do not vanish. If the scale is
too large, gradients overflow: that step moves no weight, and the scale is halved. After many steps
without overflow it is doubled. All of this happens on the device. torch.amp.GradScaler does the
same but hides the flag that the check for NaN needs.
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
from hardmix.runtime.device import Late
from hardmix.runtime.distributed import rank
from hardmix.runtime.files import write_atomically

MOST_SKIPPED = 20
"""Most steps in a row that train.on_nan=skip skips; after more, the run has diverged."""
MOST_KEPT = 3
"""Most folders nan-step-N of a run, since each holds a complete state."""
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""GradScaler's defaults: first scale, its factors, steps without overflow until it grows."""


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
    """A copy of what a step changes besides the trained weights, to undo the step.

    It holds batch norm's statistics and momentum encoders. If the verdict is read a step later, it
    also holds what is written after the step, and the last two states are kept.
    """

    def __init__(self, method: Method, trained: Iterable[nn.Parameter], late: bool) -> None:
        omitted = set(map(id, trained))
        if not late:
            omitted |= set(map(id, method.replicated().values()))
        state = [*method.parameters(), *method.buffers()]
        state = [tensor.detach() for tensor in state if id(tensor) not in omitted]
        groups: dict[Any, list[Tensor]] = {}
        for tensor in state:  # a GPU copies tensors of one kind in one call
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._groups = list(groups.values())
        self._copies = [
            [[each.clone() for each in group] for group in self._groups] for _ in range(1 + late)
        ]
        inherited = nn.Module.get_extra_state
        self._numbers = [
            module for module in method.modules() if type(module).get_extra_state is not inherited
        ]
        self._extra: list[list[Any]] = [[] for _ in range(1 + late)]

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Remember the state before this step."""
        slot = step % len(self._copies)
        for copies, group in zip(self._copies[slot], self._groups, strict=True):
            torch._foreach_copy_(copies, group)
        self._extra[slot] = [copy.deepcopy(module.get_extra_state()) for module in self._numbers]

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Restore the state before this step."""
        slot = step % len(self._copies)
        for copies, group in zip(self._copies[slot], self._groups, strict=True):
            torch._foreach_copy_(group, copies)
        for module, extra in zip(self._numbers, self._extra[slot], strict=True):
            module.set_extra_state(extra)


def likely_reasons(lr: float, precision: str) -> str:
    """Return the likely causes of NaN, and what to try."""
    reasons = [f"a learning rate that is too high (optimizer.lr={lr:g})"]
    if precision != "fp32":
        reasons.append(f"{precision} (try train.precision=fp32)")
    return ", ".join([*reasons, "images of one colour under batch normalisation, broken hardware"])


def keep_for_inspection(
    folder: Path, state: dict[str, Tensor], batch: dict[str, Tensor], facts: dict[str, Any]
) -> str:
    """Write state, batches and facts to RUN/nan-step-N; return a clause that says so.

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
    """Return copies on the CPU that share no memory; with one view, the key is the query."""
    return {
        name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in tensors.items()
    }


def first_names(names: Sequence[str], number: int = 5) -> str:
    """Return the first few names, and how many more there are, for a message."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" * (len(names) > number))


class LossScaler:
    """The loss scale, and the number of steps since the last overflow."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), START, device=device)
        self._inverse = torch.empty_like(self.scale)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale_(self, gradients: list[Tensor]) -> Float[Tensor, ""]:
        """Unscale gradients in place; return 1 if one of them is NaN or infinite, else 0."""
        torch.reciprocal(self.scale, out=self._inverse)
        broken = torch.zeros_like(self.scale)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, broken, self._inverse)
        return broken

    def update(self, broken: Float[Tensor, ""]) -> None:
        """Adjust the scale after a step."""
        torch._amp_update_scale_(self.scale, self._steps, broken, GROWTH, BACKOFF, INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        return {"scale": self.scale, "steps": self._steps}
