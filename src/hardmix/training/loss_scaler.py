"""Loss scaling for train.precision=fp16, so that small gradients do not vanish.

If the scale is too large, gradients overflow: that step moves no weight, and the scale is halved.
After many steps without overflow it is doubled. All of this happens on the device without waiting.
torch.amp.GradScaler does the same but hides the flag that the check for NaN needs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""GradScaler's defaults: first scale, its factors, steps without overflow until it grows."""


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
