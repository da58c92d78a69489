"""Normalise vectors of any length: in one pass on a CPU, in few launches elsewhere."""

from typing import Any

import torch
from torch import Tensor

from hardmix.mixing.checks import check_directions, wants_check

SHORTEST, LONGEST = 1e-12, 1e15
"""Lengths whose squares neither vanish nor overflow in float32."""


def unit_vectors(
    name: str, value: Tensor, dtype: torch.dtype | None = None, check: bool | None = None
) -> Tensor:
    """Return the vectors at unit length, in float32 or better; refuse zero, NaN and infinity.

    Unchecked (see `wants_check`), such vectors become NaN.
    """
    if dtype is None:
        dtype = torch.promote_types(value.dtype, torch.float32)
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    if value.device.type != "cpu" or torch.compiler.is_compiling():
        if wants_check(check, value):
            check_directions(name, value)
        return at_unit_length(value).to(dtype)
    length = torch.linalg.vector_norm(value, dim=1, keepdim=True)
    lengths = length.detach()
    shortest, longest = map(float, torch.aminmax(lengths)) if len(value) else (1.0, 1.0)
    if not (shortest > SHORTEST and longest < LONGEST):  # also if one is NaN
        if wants_check(check, value):
            check_directions(name, value)
        return at_unit_length(value).to(dtype)
    rounding = 4 * torch.finfo(value.dtype).eps
    if not length.requires_grad and longest - 1 <= rounding and 1 - shortest <= rounding:
        return value.to(dtype)
    unit: Tensor = (value / length).to(dtype)
    return unit


def at_unit_length(value: Tensor) -> Tensor:
    """Return the vectors at unit length; NaN for those that are zero or not finite."""
    unit: Tensor = _UnitLength.apply(value)
    return unit


class _UnitLength(torch.autograd.Function):
    """x / |x| and its gradient, in few launches."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        if value.dtype == torch.float32:  # no square of these overflows or vanishes in float64
            length = torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=torch.float64)
        else:
            largest = value.abs().amax(dim=1, keepdim=True)
            length = torch.linalg.vector_norm(value / largest, dim=1, keepdim=True) * largest
        unit = _divided(value, length)
        ctx.save_for_backward(value, unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        value, unit, length = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # differentiated again
            with torch.enable_grad():
                again = value / torch.linalg.vector_norm(value, dim=1, keepdim=True)
                slow: Tensor
                (slow,) = torch.autograd.grad(again, value, gradient, create_graph=True)
            return slow
        with torch.autocast(unit.device.type, enabled=False):
            along = row_products(gradient, unit)
        return _divided(torch.addcmul(gradient, along, unit, value=-1), length)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of rows, (batch, 1), in one launch."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).squeeze(2)


def _divided(value: Tensor, length: Tensor) -> Tensor:
    """Divide by a length in float64, in one launch, without changing the dtype."""
    return torch.div(value, length, out=torch.empty_like(value))
