"""train.precision=fp16: the loss is scaled up, so that small gradients do not vanish.

A scale that is too large makes gradients overflow: that step moves no weight, and the scale is
halved; after many steps without it is doubled. All of it happens on the device, and nobody waits.
torch.amp.GradScaler does the same and hides the flag that our check for NaN needs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""GradScaler's: the first scale, its factors, and steps without overflow until it grows."""


class LossScaler:
    """The scale, and for how many steps nothing has overflowed."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), START, device=device)
        self._inverse = torch.empty_like(self.scale)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale_(self, gradients: list[Tensor]) -> Float[Tensor, ""]:
        """Gradients of the loss itself; 1 where one of them is NaN or infinite, else 0."""
        torch.reciprocal(self.scale, out=self._inverse)
        broken = torch.zeros_like(self.scale)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, broken, self._inverse)
        return broken

    def update(self, broken: Float[Tensor, ""]) -> None:
        """After a step."""
        torch._amp_update_scale_(self.scale, self._steps, broken, GROWTH, BACKOFF, INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "steps": self._steps}
